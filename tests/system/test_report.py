"""``hvdkit report`` as a user runs it, and its page in a browser that has no network.

Screenshots are kept in the folder that HVDKIT_SCREENSHOTS names, build/screenshots by default.
"""

import base64
import json
import os
import shutil
from pathlib import Path

import pytest

from tests.system.command import ROOT, run_hvdkit
from tests.unit.results.golden_files import FOLDER, PATHS, load, save

SCREENSHOTS = Path(os.environ.get("HVDKIT_SCREENSHOTS", ROOT / "build" / "screenshots"))
PHONE, DESK = 390, 1280

# Of each chart: its box, how many shapes with an extent lie within it, the smallest text.
MEASURE = """
return Array.from(document.querySelectorAll('figure svg')).map(svg => {
  const box = svg.getBoundingClientRect();
  const shapes = Array.from(svg.querySelectorAll('path, use')).map(e => e.getBoundingClientRect());
  const texts = Array.from(svg.querySelectorAll('text'));
  const inside = r => r.left >= box.left - 1 && r.right <= box.right + 1
    && r.top >= box.top - 1 && r.bottom <= box.bottom + 1;
  return {
    title: svg.querySelector('title').textContent,
    width: box.width, height: box.height,
    drawn: shapes.filter(r => r.width + r.height > 0 && inside(r)).length,
    outside: texts.filter(t => !inside(t.getBoundingClientRect())).map(t => t.textContent),
    smallest: Math.min(...texts.map(t =>
      parseFloat(getComputedStyle(t).fontSize) * box.width / svg.viewBox.baseVal.width)),
  };
});
"""


@pytest.fixture(scope="module")
def browser():
    """A headless Chromium that resolves no name."""
    from selenium.webdriver import Chrome, ChromeOptions
    from selenium.webdriver.chrome.service import Service

    options = ChromeOptions()
    options.binary_location = shutil.which("chromium")
    for argument in (
        "--headless=new",
        "--disable-dev-shm-usage",
        "--host-resolver-rules=MAP * ~NOTFOUND",
        *(["--no-sandbox"] if os.getuid() == 0 else []),
    ):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = Chrome(options=options, service=Service(shutil.which("chromedriver")))
    yield driver
    driver.quit()


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """A report of all golden files."""
    path = tmp_path_factory.mktemp("report") / "report.html"
    done = run_hvdkit("report", *PATHS, "-o", path)
    assert done.returncode == 0, done.stderr
    return path


def show(browser, path, width, scheme="light"):
    """Open a page at a width in pixels, as on a telephone where it is narrow."""
    browser.get_log("browser"), browser.get_log("performance")  # of the page before
    size = {"width": width, "height": 844, "deviceScaleFactor": 1, "mobile": width == PHONE}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    feature = {"name": "prefers-color-scheme", "value": scheme}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})
    browser.get(path.as_uri())


def find_faults(browser, path):
    """Return what a page said in the console, and what it asked for beside itself."""
    events = [json.loads(one["message"])["message"] for one in browser.get_log("performance")]
    asked = [
        event["params"]["request"]["url"]
        for event in events
        if event["method"] == "Network.requestWillBeSent"
    ]
    entries = browser.execute_script(
        "return performance.getEntriesByType('resource').map(entry => entry.name)"
    )
    said = [one["message"] for one in browser.get_log("browser")]
    return said + entries + [url for url in asked if url != path.as_uri()]


def keep_screenshot(browser, name, width):
    height = browser.execute_script("return document.documentElement.scrollHeight")
    clip = {"x": 0, "y": 0, "width": width, "height": min(height, 16000), "scale": 1}
    options = {"captureBeyondViewport": True, "clip": clip}
    shot = browser.execute_cdp_cmd("Page.captureScreenshot", options)
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    data = base64.b64decode(shot["data"])
    assert len(data) > 50_000  # an empty page has a tenth of it
    (SCREENSHOTS / f"report-{name}.png").write_bytes(data)


@pytest.mark.parametrize(
    ("width", "scheme"), [(DESK, "light"), (PHONE, "light"), (PHONE, "dark")], ids=str
)
def test_every_chart_is_drawn_and_nothing_is_fetched(browser, page, width, scheme):
    show(browser, page, width, scheme)
    assert find_faults(browser, page) == []
    charts = browser.execute_script(MEASURE)
    titles = [chart["title"] for chart in charts]
    for title in (
        "Throughput, mlp, weak scaling",
        "Efficiency, mlp, weak scaling",
        "A step's time, cnn, strong scaling",
        "All-reduce of float32, 2 workers: bus bandwidth",
        "digits: accuracy over time",
        "Predicted efficiency, 95 % band",
        "Phases of a step (they overlap)",
    ):
        assert title in titles
    for chart in charts:
        assert 300 <= chart["width"] <= width, chart
        assert chart["height"] > 100, chart
        assert chart["drawn"] > 10, chart
        assert chart["outside"] == [], chart
        assert chart["smallest"] >= 10, chart
    assert browser.execute_script("return document.documentElement.scrollWidth") <= width
    dark = browser.execute_script("return getComputedStyle(document.body).backgroundColor")
    assert (dark == "rgb(255, 255, 255)") == (scheme == "light")
    keep_screenshot(browser, f"{width}-{scheme}", width)


def test_a_page_that_fetches_something_is_noticed(browser, page, tmp_path):
    changed = tmp_path / "changed.html"
    text = page.read_text(encoding="utf-8").replace("default-src 'none';", "img-src *;")
    image = '<img src="http://example.org/x.png">'
    changed.write_text(text.replace("</main>", f"{image}</main>"), encoding="utf-8")
    show(browser, changed, DESK)
    assert "http://example.org/x.png" in "".join(find_faults(browser, changed))


def test_a_script_in_a_label_does_not_run(browser, tmp_path):
    attack = "<script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">"
    result = load("train")
    for run in result["summary"]["runs"]:
        run["model"] = run["candidate"] = attack
    for ratio in result["summary"]["ratios"]:
        ratio["model"] = ratio["candidate"] = attack
    result["machine"]["processor"] = attack
    path = tmp_path / "r.html"
    source = save(tmp_path, result, "<img src=x onerror=alert(1)>.json")
    assert run_hvdkit("report", source, "-o", path).returncode == 0
    show(browser, path, PHONE)
    assert browser.title == "hvdkit report"
    assert find_faults(browser, path) == []
    text = browser.execute_script("return document.body.innerText")
    assert "<script>document.title='owned'</script>" in text
    assert browser.execute_script("return document.querySelectorAll('img, script').length") == 0
    assert browser.execute_script("return document.documentElement.scrollWidth") <= PHONE


def test_it_prints(browser, page):
    show(browser, page, DESK)
    printed = browser.execute_cdp_cmd("Page.printToPDF", {"paperWidth": 8.27, "paperHeight": 11.69})
    data = base64.b64decode(printed["data"])
    assert data.startswith(b"%PDF")
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    (SCREENSHOTS / "report.pdf").write_bytes(data)


def test_markdown_from_the_command_line(tmp_path):
    path = tmp_path / "report.md"
    done = run_hvdkit("report", FOLDER / "train.json", FOLDER / "allreduce.json", "-o", path)
    assert (done.returncode, done.stdout) == (0, f"Written to {path}\n")
    assert "### mlp (torch): weak scaling, batch 32 a worker a pass" in path.read_text()


def test_what_is_wrong_is_one_line_on_stderr(tmp_path):
    path = tmp_path / "a.json"
    path.write_bytes((FOLDER / "train.json").read_bytes()[:5000])
    done = run_hvdkit("report", path, "-o", tmp_path / "r.html")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(f"Error: {path} is no JSON")
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "r.html").exists()


def test_results_of_two_machines_are_shown_with_a_warning(tmp_path):
    result = load("train")
    result["machine"]["processor"] = "abacus"
    paths = FOLDER / "train.json", save(tmp_path, result, "other.json")
    done = run_hvdkit("report", *paths, "-o", tmp_path / "r.html")
    assert done.returncode == 0
    assert "Warning: other.json was not measured under the conditions of train.json" in done.stderr
    assert "and abacus" in (tmp_path / "r.html").read_text()
