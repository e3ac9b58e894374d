"""The site: its navigation has every page, its reference every public name, its pictures a text; it builds."""

import ast
import importlib
import importlib.util
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest

import looptape
from looptape import launch, losses, models
from tests.dashboard.browser import browsing
from tests.test_docs import ROOT, TEXTS

CONF = ROOT / "docs" / "conf.py"
REFERENCE = sorted((ROOT / "docs" / "reference").glob("*.md"))


def contents():
    """The table of contents in docs/conf.py, which is not imported: it changes the environment."""
    for node in ast.parse(CONF.read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "CONTENTS":
            return ast.literal_eval(node.value)
    raise AssertionError("docs/conf.py has no CONTENTS")


def test_the_navigation_has_every_page_once():
    listed = [page for pages in contents().values() for page in pages]
    pages = {str(path.relative_to(ROOT).with_suffix("")) for path in TEXTS} - {"README"}
    assert sorted(listed) == sorted(pages)


def test_every_page_is_two_clicks_from_the_front_page():
    """By links alone, without the sidebar: from the README, or from a page that the README links to."""
    near = linked(ROOT / "README.md")
    reached = near.union(*(linked(page) for page in near))
    reference = set(REFERENCE)  # generated pages, which only the sidebar lists
    far = {str(path.relative_to(ROOT)) for path in TEXTS if path not in reached | reference} - {"README.md"}
    assert not far


def linked(page):
    """The texts of the repository that a text links to."""
    targets = re.findall(r"\]\(([^)#:]+\.md)[)#]", page.read_text())
    return {(page.parent / target).resolve() for target in targets}


def directives(path):
    """[(kind, dotted name)] of the autodoc directives on a page of the reference."""
    return re.findall(r"^\.\. auto(\w+):: (\S+)$", path.read_text(), re.M)


@pytest.mark.parametrize("path", REFERENCE, ids=lambda path: path.stem)
def test_the_reference_names_what_exists(path):
    assert directives(path)
    for kind, name in directives(path):
        found = importlib.import_module(name) if kind == "module" else pkgutil.resolve_name(name)
        assert found.__doc__, name


@pytest.mark.parametrize("package", [losses, models, launch], ids=lambda package: package.__name__)
def test_the_reference_has_every_public_name(package):
    found = [pair for path in REFERENCE for pair in directives(path)]
    if ("module", package.__name__) not in found:
        assert {name for _, name in found} >= {f"{package.__name__}.{name}" for name in package.__all__}


def test_the_reference_has_every_name_of_looptape():
    found = {name for path in REFERENCE for _, name in directives(path)}
    for name in looptape.__all__:
        if name != "errors":  # its members are listed as looptape.<name>
            inside = f"looptape.{name}."  # of a module
            assert f"looptape.{name}" in found or any(other.startswith(inside) for other in found), name


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The folder of the site, built once."""
    if importlib.util.find_spec("sphinx") is None:
        pytest.skip("Sphinx is not installed; `make docs` installs it")
    built = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-c", "docs", ".", str(built)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900, check=False)
    assert run.returncode == 0, run.stderr[-3000:]
    return built


@pytest.mark.long
def test_the_site_builds_without_warnings(site):
    front = (site / "index.html").read_text()
    for page in (page for pages in contents().values() for page in pages):
        assert (site / f"{page}.html").exists(), page
        assert f'href="{page}.html"' in front, page
    assert (site / "searchindex.js").exists()


# What sticks out of the window on the right, and is not inside something that scrolls by itself, as wide tables do.
OUTSIDE = """
const scrolls = (e) => e && e !== document.body && (/auto|scroll|hidden/.test(getComputedStyle(e).overflowX)
  || scrolls(e.parentElement));
const out = [...document.querySelectorAll('article *')].filter((e) => {
  const box = e.getBoundingClientRect();
  return box.width > 1 && box.right > document.documentElement.clientWidth + 1 && !scrolls(e.parentElement);
});
const wide = document.documentElement.scrollWidth - document.documentElement.clientWidth;
return (wide > 0 ? [`the page, by ${wide} px`] : []).concat(out.slice(0, 3).map((e) => e.outerHTML.slice(0, 120)));
"""


@pytest.mark.long
@pytest.mark.browser
@pytest.mark.skipif(browsing.missing() is not None, reason=str(browsing.missing()))
def test_no_page_is_wider_than_a_telephone_or_a_screen(site, tmp_path):
    pages = sorted(path for path in site.rglob("*.html") if "_static" not in path.parts)
    assert len(pages) > len([page for pages in contents().values() for page in pages])
    found = {}
    with browsing.chromium(tmp_path) as (browser, _):
        for width in (390, 1440):
            metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
            browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
            sticking_out = f"<article><p style='width: {width + 20}px'>wide</p></article>"
            browser.get(f"data:text/html,<meta name=viewport content='width=device-width'>{sticking_out}")
            assert browser.execute_script(OUTSIDE), "otherwise nothing below could fail"
            for path in pages:
                browser.get(path.as_uri())
                outside = browser.execute_script(OUTSIDE)
                if outside:
                    found[str(path.relative_to(site)), width] = outside
    assert found == {}


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_pictures_have_texts(path):
    for text, target in re.findall(r"!\[(.*?)\]\((.*?)\)", path.read_text(), re.S):
        assert len(text.split()) >= 3, f"{target} is described by {text!r}; say what it shows"
        assert Path(target).stem not in text
