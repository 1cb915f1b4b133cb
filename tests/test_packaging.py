"""The two commands: from nothing to an installed course, and one clear sentence whenever that can't be.

The installations here are of a miniature of the course that depends on nothing, so that they take seconds and no
network. The real one is what runs these tests: ``make test`` has installed it.
"""

import importlib.util
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import tomllib
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

# A build backend in a few lines: its wheel is empty, and nothing has to be fetched to run it.
BACKEND = """
import tomllib, zipfile

def build_editable(folder, config_settings=None, metadata_directory=None):
    needs = tomllib.load(open("pyproject.toml", "rb"))["project"]["dependencies"]
    files = {
        "METADATA": ["Metadata-Version: 2.1", "Name: miniature", "Version: 1", "Provides-Extra: test"]
        + [f"Requires-Dist: {need}" for need in needs],
        "WHEEL": ["Wheel-Version: 1.0", "Generator: miniature", "Root-Is-Purelib: true", "Tag: py3-none-any"],
        "RECORD": [],
    }
    with zipfile.ZipFile(f"{folder}/miniature-1-py3-none-any.whl", "w") as wheel:
        for name, lines in files.items():
            wheel.writestr(f"miniature-1.dist-info/{name}", "".join(line + "\\n" for line in lines))
    return "miniature-1-py3-none-any.whl"
"""
MINIATURE = """
[build-system]
requires = []
build-backend = "backend"
backend-path = ["."]

[project]
name = "miniature"
version = "1"
dependencies = [{dependencies}]
"""
# `make try` installs as `make lab` does, and then only says so.
TRY = "\ntry:\n\t$(INSTALL) $(EXTRAS)\n\t.venv/bin/python -c 'print(\"it works\")'\n"


@pytest.fixture(scope="session")
def bootstrap():
    spec = importlib.util.spec_from_file_location("bootstrap", ROOT / "course_utils" / "_bootstrap.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def course(tmp_path) -> Path:
    """A miniature of the course, in a folder with a space in its name."""
    folder = tmp_path / "my course"
    (folder / "course_utils").mkdir(parents=True)
    shutil.copy(ROOT / "course_utils" / "_bootstrap.py", folder / "course_utils")
    (folder / "Makefile").write_text((ROOT / "Makefile").read_text() + TRY)
    (folder / "pyproject.toml").write_text(MINIATURE.format(dependencies=""))
    (folder / "backend.py").write_text(BACKEND)
    return folder


def clean_environment(**changes: str) -> dict[str, str]:
    """Ours without what an outer make hands down."""
    inherited = ("MAKEFLAGS", "MFLAGS", "MAKEOVERRIDES", "MAKELEVEL", "PYTHON", "EXTRAS", "LAB_ARGS", "TEST_ARGS")
    return {name: value for name, value in os.environ.items() if name not in inherited} | changes


def make(folder: Path, *words: str, **environment: str) -> subprocess.CompletedProcess:
    words = (*words, f"PYTHON={sys.executable}") if not any(w.startswith("PYTHON=") for w in words) else words
    return subprocess.run(
        ["make", *(word for word in words if word != "PYTHON=")], cwd=folder, env=clean_environment(**environment),
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120,
    )  # fmt: skip


def stopped_with(done: subprocess.CompletedProcess) -> str:
    """The one sentence that a failed make leaves, after checking that it is one."""
    assert done.returncode != 0
    assert "Traceback" not in done.stderr
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    told = [line for line in lines if not re.match(r"make: \*\*\* \[.*\] Error \d+", line)]
    assert len(told) == 1, done.stderr
    return told[0]


def script(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


def pretend_old(path: Path) -> Path:
    """A Python that says that it is 3.8."""
    return script(path, f'#!/bin/sh\nexec "{sys.executable}" -c "import sys; sys.version_info = (3, 8, 20); $2"\n')


def tools_only(folder: Path) -> str:
    """A PATH with what make needs and no Python."""
    folder.mkdir()
    for tool in ("make", "sh", "id", "awk"):
        (folder / tool).symlink_to(shutil.which(tool))
    return str(folder)


# What stops an installation, and how it reads.


def test_without_python_one_sentence_says_what_to_install(course, tmp_path):
    sentence = stopped_with(make(course, "lab", "PYTHON=", PATH=tools_only(tmp_path / "bin")))
    assert "needs Python 3.11 to 3.14 and there is none on the PATH: install one from" in sentence


def test_a_python_that_is_too_old_is_refused_by_name(course, tmp_path):
    old = pretend_old(tmp_path / "bin dir" / "python3.8")
    sentence = stopped_with(make(course, "lab", f"PYTHON={old}"))
    assert f"needs Python 3.11 to 3.14 and PYTHON={old} is not one that runs here" in sentence


def test_an_old_python3_is_passed_over_for_a_newer_one(course, tmp_path):
    path = tools_only(tmp_path / "bin")
    pretend_old(tmp_path / "bin" / "python3")
    script(tmp_path / "bin" / "python3.13", "#!/bin/sh\necho 'no such version' >&2\nexit 127\n")  # a version manager's
    script(tmp_path / "bin" / "python3.12", f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    done = make(course, "--dry-run", "try", "PYTHON=", PATH=path)
    assert '"python3.12" -I course_utils/_bootstrap.py' in done.stdout, done.stderr


def test_help_and_clean_need_no_python(course, tmp_path):
    path = tools_only(tmp_path / "bin")
    for tool in ("rm", "find"):
        (tmp_path / "bin" / tool).symlink_to(shutil.which(tool))
    assert make(course, "clean", "PYTHON=", PATH=path).returncode == 0
    listed = make(course, "PYTHON=", PATH=path).stdout
    assert re.findall(r"^make (\S+)", listed, re.M)[:3] == ["help", "lab", "test"]


@pytest.mark.parametrize("module", ["ensurepip", "venv"])
def test_a_python_without_its_venv_module_is_told_which_package_brings_it(course, tmp_path, module):
    lacking = script(
        tmp_path / "python3",
        f"""#!/bin/sh
        if [ "$1" = -I ]; then
            shift
            exec "{sys.executable}" -I -c "
import runpy, sys
sys.modules['{module}'] = None  # what an import of it then raises is what Debian without python3-venv raises
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name='__main__')" "$@"
        fi
        exec "{sys.executable}" "$@"
        """,
    )
    sentence = stopped_with(make(course, "try", f"PYTHON={lacking}"))
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    assert f"lacks its `{module}` module" in sentence
    assert f"`sudo apt install python{version}-venv` brings it" in sentence


def no_network() -> dict[str, str]:
    with socket.socket() as unused:  # a port that was free a moment ago refuses
        unused.bind(("127.0.0.1", 0))
        nowhere = f"http://127.0.0.1:{unused.getsockname()[1]}/simple"
    return {
        "PIP_INDEX_URL": nowhere,
        "TORCH_INDEX": nowhere,
        "PIP_EXTRA_INDEX_URL": "",
        "PIP_FIND_LINKS": "",
        "PIP_RETRIES": "0",
        "PIP_CONFIG_FILE": os.devnull,
    }


def test_without_a_network_one_sentence_says_so(course):
    (course / "pyproject.toml").write_text(MINIATURE.format(dependencies='"torch==2.13.0"'))
    sentence = stopped_with(make(course, "try", **no_network()))
    assert sentence == "The package index does not answer: check the network (and `pip config list`), then try again."
    assert (course / ".venv" / "install.log").exists()  # what pip said, for whoever helps


def test_without_disk_space_nothing_is_started(course, bootstrap, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: shutil._ntuple_diskusage(10**11, 10**11, 3 * 10**8))
    with pytest.raises(bootstrap.Stopped, match=r"needs 2\.5 GB of free disk space .* has 0\.3 GB"):
        bootstrap.install(course, set())
    assert not (course / ".venv").exists()


@pytest.mark.parametrize(
    "said, told",
    [
        ("OSError: [Errno 28] No space left on device: '/tmp/pip-unpack'", "There is no space left"),
        ("WARNING: Retrying ... SSLError(SSLCertVerificationError(1, 'CERTIFICATE_VERIFY_FAILED", "reached securely"),
        ("NewConnectionError: [Errno -3] Temporary failure in name resolution", "index does not answer"),
        ("ReadTimeoutError: HTTPSConnectionPool(host='x', port=443): Read timed out.", "index does not answer"),
        (
            "ERROR: Could not find a version that satisfies the requirement torch==2.13.0 (from versions: 2.14.0)\n"
            "ERROR: No matching distribution found for torch==2.13.0",
            "has no torch==2.13.0 for Python",
        ),
        ("PermissionError: [Errno 13] Permission denied: '/course/.venv'", "can't be written to"),
        ("ERROR: the wheel was square.\n", "The installation failed: the wheel was square."),
        ("", "The installation failed: pip gave no reason."),
    ],
)
def test_what_pip_says_becomes_one_sentence(bootstrap, said, told):
    sentence = str(bootstrap.explain(said))
    assert told in sentence
    assert "\n" not in sentence


# The installation itself.


def test_the_second_time_is_quick_and_changes_nothing(course):
    first = make(course, "try")
    assert first.stdout.splitlines()[-1] == "it works", first.stderr
    stamp = (course / ".venv" / ".course.json").read_bytes()
    start = time.monotonic()
    second = make(course, "try")
    assert time.monotonic() - start < 5  # making and installing takes longer, looking takes a fraction of a second
    assert second.stdout.splitlines()[1:] == ["it works", ".venv/bin/python -c 'print(\"it works\")'"][::-1]
    assert (course / ".venv" / ".course.json").read_bytes() == stamp

    # What a second command needs is added to what the first one installed.
    python = course / ".venv" / "bin" / "python"
    made = python.lstat().st_mtime_ns
    assert "to add: test" in make(course, "try", "EXTRAS=test").stdout
    assert "Making" not in make(course, "try").stdout
    assert python.lstat().st_mtime_ns == made

    # A changed pyproject.toml is followed; where that fails for want of a network, the old installation stays usable.
    project = (course / "pyproject.toml").read_text()
    (course / "pyproject.toml").write_text(project.replace("dependencies = []", 'dependencies = ["torch==2.13.0"]'))
    assert "does not answer" in stopped_with(make(course, "try", **no_network()))
    (course / "pyproject.toml").write_text(project)
    assert make(course, "try").stdout == second.stdout


def test_an_interrupted_installation_is_started_over(course):
    interrupted = subprocess.Popen(
        [sys.executable, "-I", "course_utils/_bootstrap.py"], cwd=course, env=clean_environment(),
        start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    deadline = time.monotonic() + 60
    while not list(course.glob(".venv/bin/python*")) and time.monotonic() < deadline:
        time.sleep(0.01)
    os.killpg(interrupted.pid, signal.SIGKILL)  # power cut, closed lid: nobody gets to tidy up
    interrupted.wait()
    done = make(course, "try")
    assert "the last installation was interrupted" in done.stdout, done.stderr
    assert done.stdout.splitlines()[-1] == "it works"


def test_a_folder_that_moved_or_lost_its_python_is_installed_again(course):
    make(course, "try")
    moved = course.rename(course.parent / "elsewhere")
    done = make(moved, "try")
    assert f"the folder has moved here from {course}" in done.stdout, done.stderr
    assert done.stdout.splitlines()[-1] == "it works"
    (moved / ".venv" / "bin" / "python").unlink()
    done = make(moved, "try")
    assert "is gone" in done.stdout, done.stderr
    assert done.stdout.splitlines()[-1] == "it works"


def test_the_python_of_the_environment_itself_can_start_make(course):
    make(course, "try")
    python = course / ".venv" / "bin" / "python"
    (course / ".venv" / ".course.json").write_text('{"unfinished": true}')
    done = make(course, "try", f"PYTHON={python}")  # as with .venv activated
    assert done.stdout.splitlines()[-1] == "it works", done.stderr


def test_an_environment_that_make_did_not_make_is_left_alone(course):
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", course / ".venv"], check=True)
    sites = next((course / ".venv").glob("lib/python*/site-packages"))
    (sites / "pip.py").write_text("")
    assert ".venv was not made by this Makefile, so it is left alone" in stopped_with(make(course, "try"))
    assert (sites / "pip.py").exists()


# Which torch.


class Answering(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()

    def log_message(self, *args):
        pass


def test_an_index_counts_only_if_it_answers_in_time(bootstrap):
    with HTTPServer(("127.0.0.1", 0), Answering) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        assert bootstrap.answers(f"http://127.0.0.1:{server.server_port}/torch/")
        server.shutdown()
    with socket.create_server(("127.0.0.1", 0)) as silent:
        start = time.monotonic()
        assert not bootstrap.answers(f"http://127.0.0.1:{silent.getsockname()[1]}/torch/", seconds=0.5)
        assert time.monotonic() - start < 2
    assert not bootstrap.answers(f"{no_network()['TORCH_INDEX']}/torch/")


@pytest.mark.parametrize("gpu, reachable, commands", [(False, True, 2), (False, False, 1), (True, True, 1)])
def test_torch_comes_without_cuda_where_there_is_no_gpu_and_the_index_answers(
    bootstrap, monkeypatch, tmp_path, gpu, reachable, commands
):
    ran = []
    monkeypatch.setattr(bootstrap, "wants_cpu_build", lambda: not gpu)
    monkeypatch.setattr(bootstrap, "answers", lambda url: reachable)
    monkeypatch.setattr(bootstrap, "run", lambda command, log, cwd: ran.append([str(part) for part in command]))
    monkeypatch.delenv("TORCH_INDEX", raising=False)
    bootstrap.install_packages(ROOT, tmp_path / ".venv", {"test", "bench"})
    assert len(ran) == commands
    assert ran[-1][-2:] == ["--editable", ".[bench,test]"]
    if commands == 2:
        assert ran[0][-4:] == ["--no-deps", "--index-url", "https://download.pytorch.org/whl/cpu", "torch==2.13.0"]


# One list of dependencies.


def test_environment_yml_adds_python_and_pip_to_pyproject_and_nothing_else():
    listed = yaml.safe_load((ROOT / "environment.yml").read_text())
    *conda, pip = listed["dependencies"]
    assert listed["name"] == PROJECT["name"]
    assert conda == [f"python{PROJECT['requires-python']}", "pip"]
    assert [line for line in pip["pip"] if not line.startswith("--extra-index-url ")] == ["--editable ."]


def test_the_python_versions_are_the_same_everywhere(bootstrap):
    assert PROJECT["requires-python"] == ">=3.11,<3.15"
    assert "(3, 11) <= sys.version_info[:2] <= (3, 14)" in (ROOT / "Makefile").read_text()
    assert f'"--extra-index-url {bootstrap.TORCH_INDEX}"'.strip('"') in (ROOT / "environment.yml").read_text()


def test_torch_is_pinned_to_the_release_that_printed_the_outputs(bootstrap):
    assert bootstrap.torch_requirement(ROOT) == "torch==2.13.0"


# What the repository says of itself.


def test_the_links_of_the_readme_lead_somewhere():
    readme = (ROOT / "README.md").read_text()
    targets = [target for target in re.findall(r"\]\(([^)#]+)[^)]*\)", readme) if "://" not in target]
    assert targets
    assert [target for target in targets if not (ROOT / target).exists()] == []


def test_the_readme_lists_the_notebooks_that_exist():
    listed = re.findall(r"\]\((notebooks/[^)]+\.ipynb)\)", (ROOT / "README.md").read_text())
    assert sorted(set(listed)) == sorted(f"notebooks/{path.name}" for path in (ROOT / "notebooks").glob("*.ipynb"))


def test_ruff_finds_nothing():
    command = [sys.executable, "-m", "ruff", "check", "--output-format=concise", "."]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


# The settings of the tests themselves.

SKIPS = """
import unittest
import pytest

def test_passes(): pass

@pytest.mark.skip(reason="marked")
def test_skip_mark(): pass

@pytest.mark.skipif(True, reason="if")
def test_skipif_mark(): pass

def test_skips_inside(): pytest.skip("inside")

def test_importorskip(): pytest.importorskip("no_such_module")

@pytest.fixture
def lacking(): pytest.skip("in a fixture")

def test_fixture(lacking): pass

class TestOld(unittest.TestCase):
    def test_unittest(self): self.skipTest("unittest")

@pytest.mark.xfail(reason="known")
def test_expected_failure(): assert False
"""


@pytest.mark.parametrize(
    "strict, workers", [(False, ()), (True, ()), (True, ("-n", "2"))], ids=["laptop", "ci", "ci with two workers"]
)
def test_the_switch_turns_every_skip_into_a_failure(tmp_path, strict, workers):
    tests = tmp_path / "tests"
    tests.mkdir()
    shutil.copy(ROOT / "tests" / "conftest.py", tests)
    (tests / "test_skips.py").write_text(SKIPS)
    (tests / "test_module.py").write_text("import pytest\npytest.importorskip('no_such_module')\n")
    environment = clean_environment() | {"COURSE_NO_SKIP": "1" if strict else ""}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-rfE", *workers, "--continue-on-collection-errors"],
        cwd=tmp_path, env=environment, capture_output=True, text=True,
    )  # fmt: skip
    closing = done.stdout.splitlines()[-1]
    if strict:
        # Three in the test itself; two marked, one in a fixture and one module, which pytest calls errors.
        assert "3 failed, 1 passed, 1 xfailed, 4 errors" in closing, done.stdout
        assert "this was skipped. Skipped: in a fixture" in done.stdout
        assert done.returncode != 0
    else:
        assert "1 passed, 7 skipped, 1 xfailed" in closing, done.stdout
        assert done.returncode == 0


def test_the_cells_of_a_notebook_stay_on_one_worker(tmp_path):
    from nbformat import v4, write

    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    (tmp_path / "notebooks").mkdir()
    for name in "ab":
        cells = [v4.new_code_cell("x = 0", execution_count=1)]
        for count in range(1, 8):
            shown = v4.new_output("execute_result", {"text/plain": str(count)}, execution_count=count + 1)
            cells.append(v4.new_code_cell("x += 1\nx", execution_count=count + 1, outputs=[shown]))
        write(v4.new_notebook(cells=cells), tmp_path / "notebooks" / f"{name}.ipynb")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "--nbval", "-n", "2", "notebooks"],
        cwd=tmp_path, env=clean_environment(), capture_output=True, text=True,
    )  # fmt: skip
    assert "16 passed" in done.stdout.splitlines()[-1], done.stdout
