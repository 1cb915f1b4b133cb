"""What ``make lab`` opens, used as a learner uses it: open a notebook, Run All, save; the committed outputs come back.

The browser works on a copy of ``notebooks/`` without outputs, so nothing that it finds there was there before.
``COURSE_SCREENSHOTS=folder`` keeps the pictures that it takes.
"""

import contextlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import nbformat
import psutil
import pytest
from nbval.plugin import IPyNbFile, coalesce_streams

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
MINUTES = 60_000  # milliseconds

BROWSER = os.environ.get("COURSE_BROWSER") or next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
# A browser that a test drives shows its pages and asks nobody for anything else.
QUIET = """--no-sandbox --disable-gpu --disable-quic --disable-background-networking --disable-component-update
    --disable-sync --no-first-run""".split()

pytestmark = [
    pytest.mark.browser,
    pytest.mark.timeout(600),
    pytest.mark.skipif(BROWSER is None, reason="no Chromium or Chrome on the PATH, and COURSE_BROWSER names none"),
]

# Settings of the person at the browser: no questions about news, and every cell drawn, so that each prompt can be read.
SETTINGS = {
    "apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False, "doNotDisturbMode": True},
    "notebook-extension/tracker": {"windowingMode": "none"},
    "docmanager-extension/plugin": {"autosave": False},
}


@pytest.fixture(scope="module")
def lab(tmp_path_factory) -> Iterator[tuple[str, Path]]:
    """The address of a JupyterLab started by the line in the Makefile, and the folder that it shows."""
    folder = tmp_path_factory.mktemp("lab")
    course, runtime = folder / "course", folder / "runtime"
    shutil.copytree(ROOT / "notebooks", course / "notebooks", ignore=shutil.ignore_patterns(".ipynb_checkpoints"))
    shutil.copy(ROOT / "README.md", course)
    for copy in course.glob("notebooks/*.ipynb"):
        notebook = nbformat.read(copy, as_version=4)
        for cell in notebook.cells:
            if cell.cell_type == "code":
                cell.outputs, cell.execution_count = [], None
        nbformat.write(notebook, copy)
    for name, settings in SETTINGS.items():
        written = folder / "settings" / "@jupyterlab" / f"{name}.jupyterlab-settings"
        written.parent.mkdir(parents=True, exist_ok=True)
        written.write_text(json.dumps(settings))

    environment = os.environ | {
        "JUPYTER_CONFIG_DIR": str(folder / "config"),
        "JUPYTER_DATA_DIR": str(folder / "data"),
        "JUPYTER_RUNTIME_DIR": str(runtime),
        "JUPYTERLAB_SETTINGS_DIR": str(folder / "settings"),
        "JUPYTERLAB_WORKSPACES_DIR": str(folder / "workspaces"),
        "IPYTHONDIR": str(folder / "ipython"),
    }
    log = folder / "lab.log"
    with log.open("w") as output:
        server = psutil.Popen(lab_command(), cwd=course, env=environment, stdout=output, stderr=output)
    try:
        yield address(server, runtime, log), course
    finally:
        end(server)


def lab_command() -> list[str]:
    """The Makefile's own line for JupyterLab, with a port of the server's choice and this environment's programs."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    arguments = "LAB_ARGS=--no-browser --port=0"
    shown = subprocess.check_output(
        ["make", "--dry-run", "lab", arguments, f"PYTHON={sys.executable}"], cwd=ROOT, env=inherited, text=True
    )
    program, *rest = shlex.split(shown.splitlines()[-1])
    assert program == ".venv/bin/jupyter"
    return [sys.executable, "-m", "jupyter", *rest]


def address(server: psutil.Popen, runtime: Path, log: Path) -> str:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        assert server.poll() is None, log.read_text()
        for info in runtime.glob("jpserver-*.json"):
            with contextlib.suppress(ValueError):  # half written
                said = json.loads(info.read_text())
                return f"{said['url']}lab/tree/{{}}?token={said['token']}&reset"
        time.sleep(0.1)
    raise AssertionError(f"JupyterLab did not start: {log.read_text()}")


def end(server: psutil.Popen) -> None:
    """End the server; what it started has to end with it: kernels, and the ranks that they started."""
    started = server.children(recursive=True)
    server.terminate()
    _, left = psutil.wait_procs([server, *started], timeout=30)
    told = [" ".join(process.cmdline()) for process in left if process.is_running()]
    for process in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    assert not told, f"still there 30 s after JupyterLab was asked to end: {told}"


@pytest.fixture(scope="module")
def browser():
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with playwright.sync_playwright() as driver:
        with contextlib.closing(driver.chromium.launch(executable_path=BROWSER, args=QUIET)) as browser:
            yield browser


@pytest.fixture
def page(browser):
    with contextlib.closing(browser.new_context(viewport={"width": 1400, "height": 1000})) as context:
        page = context.new_page()
        page.set_default_timeout(1 * MINUTES)
        yield page


@pytest.fixture
def picture(tmp_path, request):
    """Takes a screenshot under a name, and says where it is."""
    folder = Path(os.environ.get("COURSE_SCREENSHOTS") or tmp_path)
    folder.mkdir(parents=True, exist_ok=True)

    def take(page, name: str) -> None:
        page.screenshot(path=folder / f"{name}.png")
        print("screenshot:", folder / f"{name}.png")

    return take


def test_make_lab_opens_on_the_notebooks(lab, page, picture):
    url, course = lab
    page.goto(url.replace("lab/tree/{}", ""))  # from here the server leads to where the Makefile says
    for name in sorted(path.name for path in course.glob("notebooks/*.ipynb")):
        page.get_by_role("listitem", name=re.compile(rf"^Name: {re.escape(name)}")).wait_for()
    picture(page, "lab")


@pytest.mark.parametrize("committed", NOTEBOOKS, ids=lambda path: path.stem)
def test_run_all_brings_back_the_committed_outputs(committed, lab, page, picture, pytestconfig, request):
    url, course = lab
    copy = course / "notebooks" / committed.name
    page.goto(url.format(f"notebooks/{committed.name}"))
    notebook = page.locator(".jp-NotebookPanel:not(.lm-mod-hidden)")
    notebook.locator(".jp-Cell").first.wait_for()
    page.locator("#jp-main-statusbar").get_by_text("| Idle").wait_for()  # what is run while it connects gets lost

    choose(page, "Run", "Run All Cells")
    count = sum(bool(cell.source.strip()) for cell in code_cells(copy))
    wait_until_done(page, notebook, count)
    picture(page, f"{committed.stem}-end")
    notebook.locator(".jp-Cell").first.scroll_into_view_if_needed()
    picture(page, committed.stem)

    page.keyboard.press("Control+s")
    deadline = time.monotonic() + 30
    while not any(cell.outputs for cell in code_cells(copy)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert differences(committed, copy, request.session) == []


def choose(page, menu: str, entry: str) -> None:
    """Pick an entry of a menu, once JupyterLab offers it."""
    page.locator(".lm-MenuBar-itemLabel", has_text=re.compile(f"^{menu}$")).click()
    label = page.locator(".lm-Menu-itemLabel", has_text=re.compile(f"^{entry}$"))
    page.locator(".lm-Menu-item:not(.lm-mod-disabled)").filter(has=label).click()


def wait_until_done(page, notebook, count: int) -> None:
    """Until all ``count`` cells have a number, or the kernel rests for good before that: an error ends a Run All."""
    deadline = time.monotonic() + 300
    resting = 0
    while time.monotonic() < deadline:
        prompts = notebook.locator(".jp-CodeCell .jp-InputPrompt").all_inner_texts()
        numbered = sum(bool(re.match(r"\[\d+\]", prompt)) for prompt in prompts)
        idle = "| Idle" in page.locator("#jp-main-statusbar").inner_text()
        resting = resting + 1 if idle else 0
        if resting and numbered >= count or resting > 20:
            return
        page.wait_for_timeout(250)
    raise AssertionError(f"after 300 s {numbered} of {count} cells have run")


def code_cells(path: Path) -> list:
    try:
        return [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]
    except (ValueError, nbformat.reader.NotJSONError):  # while JupyterLab writes it
        return []


def differences(committed: Path, copy: Path, session) -> list[str]:
    """Cells whose outputs differ by nbval's rule: its marks, its merging of streams, the outputs that it ignores."""
    judges = list(IPyNbFile.from_parent(session, path=committed).collect())
    found = []
    ran = code_cells(copy)
    assert len(judges) == len(ran)
    for judge, cell in zip(judges, ran, strict=True):
        errors = [out for out in cell.outputs if out.output_type == "error"]
        if errors and not judge.options["check_exception"]:
            found.append(f"{judge.name}: {errors[0].ename}: {errors[0].evalue}")
        elif judge.options["check"] and not judge.options["skip"]:
            if not judge.compare_outputs(coalesce_streams(cell.outputs), coalesce_streams(judge.cell.outputs)):
                found.append(f"{judge.name}:\n" + "\n".join(map(str, judge.comparison_traceback)))
    return found
