"""Makes ``.venv`` beside the Makefile and installs the course into it, or finds that this is done already.

``make`` runs this file as ``python3 -I course_utils/_bootstrap.py [EXTRA ...]`` before anything is installed, so it
uses the standard library only. When ``.venv`` is finished and fits ``pyproject.toml`` it returns at once. A ``.venv``
that was interrupted, that has moved, or whose Python has gone is made anew. Whatever stops the installation is told in
one sentence.
"""

import hashlib
import json
import os
import platform
import re
import shutil
import ssl
import subprocess
import sys
import threading
import tomllib
import urllib.request
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"  # builds without CUDA: 0.2 GB to fetch where PyPI's take several
FREE_SPACE = 2.5e9  # bytes; the finished .venv takes about 1.7 GB, pip needs the rest while it unpacks


class Stopped(Exception):
    """The installation can't go on; the message is the sentence that the reader sees.

    ``touched`` says whether ``.venv`` may have been changed by then and can't be trusted any more.
    """

    def __init__(self, sentence: str, touched: bool = True):
        super().__init__(sentence)
        self.touched = touched


def main(extras: list[str]) -> None:
    with (ROOT / "pyproject.toml").open("rb") as pyproject:
        wait_for_others(pyproject)  # `make lab` and `make test` in two terminals take turns
        install(ROOT, set(extras))


def install(root: Path, extras: set[str]) -> None:
    """Bring ``root/.venv`` to where ``pyproject.toml`` with these extras wants it."""
    venv, project = root / ".venv", fingerprint(root)
    stamp = Stamp(venv / ".course.json")
    state, reason = examine(root, stamp, extras)
    if state == "ready":
        return
    before = stamp.read()
    if state == "make":
        require_venv_module()
        require_space(root)
        say(f"Making .venv ({reason}). The first time this takes a few minutes and about 1.7 GB.")
        empty(venv)
        stamp.write(unfinished=True)
        run([base_python(), "-I", "-m", "venv", venv], log=venv / "install.log", cwd=root)
    else:
        extras = extras | set(before["extras"])
        say(f"Bringing .venv up to date ({reason}).")
        stamp.write(**before, unfinished=True)
    try:
        install_packages(root, venv, extras)
    except Stopped as stopped:
        if state == "update" and not stopped.touched:
            stamp.write(**before)
        raise
    stamp.write(
        root=str(root),
        python=os.path.realpath(base_python()),
        version=version(venv),
        project=project,
        extras=sorted(extras),
    )
    say("Installed.")


class Stamp:
    """The file in ``.venv`` that says what ``make`` put there, and whether it finished."""

    def __init__(self, path: Path):
        self.path = path

    def read(self) -> dict:
        try:
            return json.loads(self.path.read_text())
        except (OSError, ValueError):
            return {}

    def write(self, **content) -> None:
        self.path.parent.mkdir(exist_ok=True)
        written = self.path.with_suffix(".new")
        written.write_text(json.dumps(content, indent=1))
        written.replace(self.path)


def examine(root: Path, stamp: Stamp, extras: set[str]) -> tuple[str, str]:
    """``("ready" | "update" | "make", why)`` for the ``.venv`` in ``root``."""
    venv, found = root / ".venv", stamp.read()
    if not venv.exists():
        return "make", "it is not there yet"
    works = version(venv)
    if not found:
        if works:
            raise Stopped(
                ".venv was not made by this Makefile, so it is left alone: move it away, "
                "or delete it with `make clean`, and try again."
            )
        return "make", "the one that is there has no working Python"
    if found.get("unfinished"):
        return "make", "the last installation was interrupted"
    if found["root"] != str(root):
        return "make", f"the folder has moved here from {found['root']}"
    if works != found["version"]:
        return "make", f"its Python {found['version'].split()[0]} is gone"
    if os.environ.get("PYTHON") and os.path.realpath(base_python()) != found["python"]:
        return "make", f"it was made with {found['python']}"
    if found["project"] != fingerprint(root):
        return "update", "pyproject.toml has changed"
    if missing := extras - set(found["extras"]):
        return "update", f"to add: {', '.join(sorted(missing))}"
    return "ready", ""


def install_packages(root: Path, venv: Path, extras: set[str]) -> None:
    log = venv / "install.log"
    pip = [venv / "bin" / "python", "-I", "-m", "pip", "install", "--disable-pip-version-check", "--log", log]
    if not sys.stdout.isatty():
        pip += ["--quiet", "--progress-bar", "off"]
    torch = torch_requirement(root)
    if torch and not has_torch(venv) and wants_cpu_build():
        index = os.environ.get("TORCH_INDEX") or TORCH_INDEX
        if answers(f"{index.rstrip('/')}/torch/"):
            # What torch needs comes with the rest, from the usual index.
            run([*pip, "--no-deps", "--index-url", index, torch], log=log, cwd=root)
        else:
            say(f"{index} does not answer; taking torch from the index that pip is set up with.")
    names = f"[{','.join(sorted(extras))}]" if extras else ""
    run([*pip, "--editable", f".{names}"], log=log, cwd=root)


def torch_requirement(root: Path) -> str | None:
    """The line of ``pyproject.toml`` that pins torch."""
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return next((line for line in project.get("dependencies", []) if re.match(r"torch\b", line)), None)


def has_torch(venv: Path) -> bool:
    return any(venv.glob("lib/python*/site-packages/torch-*.dist-info"))


def wants_cpu_build() -> bool:
    """On Linux PyPI's torch carries CUDA: without an NVIDIA GPU the build from PyTorch's own index is wanted."""
    nvidia = ("/proc/driver/nvidia/version", "/dev/nvidiactl", "/usr/lib/wsl/lib/nvidia-smi")
    return sys.platform == "linux" and not any(map(os.path.exists, nvidia)) and not shutil.which("nvidia-smi")


def answers(url: str, seconds: float = 5.0) -> bool:
    """Whether a web page can be had from ``url`` in time; a name server that is silent counts as no."""
    reached = []

    def ask() -> None:
        try:
            certificates = ssl.create_default_context(cafile=os.environ.get("PIP_CERT"))
            with urllib.request.urlopen(url, timeout=seconds, context=certificates) as page:
                reached.append(page.status == 200)
        except (OSError, ValueError):
            pass

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(seconds)
    return any(reached)


def require_venv_module() -> None:
    try:
        import ensurepip  # noqa: F401
        import venv  # noqa: F401
    except ImportError as error:
        raise Stopped(
            f"Python {short_version()} ({sys.executable}) lacks its `{error.name}` module, without which no virtual "
            f"environment can be made; on Debian and Ubuntu `sudo apt install python{short_version()}-venv` brings it."
        ) from error


def require_space(root: Path) -> None:
    free = shutil.disk_usage(root).free
    if free < FREE_SPACE:
        raise Stopped(
            f"The course needs {FREE_SPACE / 1e9:.1f} GB of free disk space to install and "
            f"{root} has {free / 1e9:.1f} GB: free some and try again."
        )


# What pip and venv print when something outside the course stops them, the sentence for it, and whether pip can have
# changed .venv by then: it fetches everything before it installs anything.
REASONS = [
    (
        r"No space left on device|Errno 28|Disk quota exceeded|Errno 122",
        "There is no space left: pip unpacks in the temporary folder (TMPDIR) and installs into .venv; "
        "free some space and try again.",
        True,
    ),
    (
        r"CERTIFICATE_VERIFY_FAILED|SSLError|SSLCertVerificationError",
        "The package index could not be reached securely, its certificate was refused: a proxy may stand in between, "
        "and PIP_CERT tells pip of its certificate.",
        False,
    ),
    (
        r"NewConnectionError|ConnectTimeout|ReadTimeout|Read timed out|name resolution|Name or service not known|"
        r"Network is unreachable|ProxyError|connection broken|Connection (refused|reset|aborted)|RemoteDisconnected|"
        r"Could not fetch URL",
        "The package index does not answer: check the network (and `pip config list`), then try again.",
        False,
    ),
    (
        r"(No matching distribution found for|Could not find a version that satisfies the requirement) (?P<name>\S+)",
        "The index that pip is set up with has no {name} for Python {python} on this machine ({machine}).",
        False,
    ),
    (r"Permission denied|Errno 13|Read-only file system|Errno 30", "This folder can't be written to.", True),
]


def run(command: list, log: Path, cwd: Path) -> None:
    """Run ``command``; where it fails, raise the sentence that its errors call for. ``log`` keeps all it said."""
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONHOME", "PYTHONPATH")}
    environment["PIP_USER"] = "0"  # a configured `user = true` can't work in a virtual environment
    log.unlink(missing_ok=True)
    done = subprocess.run(
        [str(part) for part in command], cwd=cwd, env=environment, stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE, text=True, errors="replace",
    )  # fmt: skip
    if done.returncode:
        try:
            logged = log.read_text(errors="replace")
        except OSError:
            logged = ""
        unreachable = re.findall(r"Could not fetch URL.*", logged)  # pip keeps this to itself
        raise explain("\n".join([*unreachable, done.stderr]), f" (all of it: {log.relative_to(cwd)})" if logged else "")


def explain(errors: str, more: str = "") -> Stopped:
    """The sentence for what pip, venv or the operating system said."""
    for pattern, sentence, touched in REASONS:
        if found := re.search(pattern, errors):
            name = found.groupdict().get("name", "")
            machine = f"{platform.system()} {platform.machine()}"
            return Stopped(sentence.format(name=name, python=short_version(), machine=machine), touched)
    told = [line for line in errors.splitlines() if line.startswith("ERROR:")] or errors.strip().splitlines()
    last = told[-1].removeprefix("ERROR:").strip().rstrip(".") if told else "pip gave no reason"
    return Stopped(f"The installation failed: {last}{more}.")


def fingerprint(root: Path) -> str:
    return hashlib.sha256((root / "pyproject.toml").read_bytes()).hexdigest()


def version(venv: Path) -> str | None:
    """What the Python in ``venv`` calls itself, or None where there is none that runs."""
    try:
        asked = subprocess.run(
            [venv / "bin" / "python", "-I", "-c", "import sys, pip; print(sys.version.replace(chr(10), ' '))"],
            capture_output=True, text=True, timeout=60,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return None
    return asked.stdout.strip() if asked.returncode == 0 else None


def short_version() -> str:
    return f"{sys.version_info.major}.{sys.version_info.minor}"


def base_python() -> str:
    """This Python; the one behind it where an activated virtual environment (.venv itself, say) comes first."""
    return getattr(sys, "_base_executable", None) or sys.executable


def empty(folder: Path) -> None:
    """Delete what is in ``folder`` (which may be a link to another disk), not the folder itself."""
    if folder.is_symlink() and not folder.exists():
        folder.unlink()
    folder.mkdir(exist_ok=True)
    for child in folder.iterdir():
        if child.is_dir() and not child.is_symlink():
            shutil.rmtree(child)
        else:
            child.unlink()


def wait_for_others(file) -> None:
    try:
        import fcntl
    except ImportError:
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        say("Another make is installing; waiting for it.")
        fcntl.flock(file, fcntl.LOCK_EX)
    except OSError:
        pass  # a file system without locks: then there is no queue either


def say(sentence: str) -> None:
    print(sentence, flush=True)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except Stopped as stopped:
        sys.exit(f"\n{stopped}")
    except KeyboardInterrupt:
        sys.exit("\nInterrupted; the next make starts over.")
    except OSError as error:
        sys.exit(f"\n{explain(str(error))}")
