"""Driving the dashboard in a real, headless Chromium: opening views, pointing, reading what is shown."""

import contextlib
import json
import pathlib
import shutil
import time
import urllib.parse

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
CHROMEDRIVER = shutil.which("chromedriver")
FLAGS = [
    "headless=new",
    "no-sandbox",
    "disable-gpu",
    "disable-quic",
    "no-first-run",
    "disable-background-networking",
    "disable-component-update",
    "disable-sync",
    "force-device-scale-factor=1",
    "window-size=1300,950",
]
AXE = pathlib.Path(__file__).parent / "axe" / "axe.min.js"
# What a heat map's canvas has around its plot; see `heatmap.js`.
LEFT, TOP, RIGHT, BOTTOM = 1, 1, 15, 22


# Calls back when the number of answers, the size of the page and all canvases stay the same for 400 ms, or after 10 s.
STEADY = """
const done = arguments[arguments.length - 1], begin = performance.now();
const look = () => JSON.stringify([performance.getEntriesByType('resource').length, innerWidth,
  document.documentElement.scrollHeight, ...[...document.querySelectorAll('canvas')].map((canvas) => {
    const {width, height, top} = canvas.getBoundingClientRect();
    return [width, height, top, canvas.width, canvas.height];
  })]);
let last = look(), since = begin;
const check = () => {
  const now = performance.now(), seen = look();
  if (seen !== last) [last, since] = [seen, now];
  if (now - since >= 400 || now - begin >= 10000) done();
  else setTimeout(check, 50);
};
check();
"""


def missing():
    """Why there is no browser to test with, or None."""
    try:
        import selenium  # noqa: F401
    except ImportError:
        return "selenium is not installed"
    if not CHROMIUM or not CHROMEDRIVER:
        return "chromium and chromedriver are not installed (apt-get install chromium chromium-driver)"
    return None


@contextlib.contextmanager
def chromium(scratch):
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in FLAGS:
        options.add_argument(f"--{flag}")
    options.add_argument(f"--user-data-dir={pathlib.Path(scratch) / 'profile'}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    browser = webdriver.Chrome(options=options, service=webdriver.ChromeService(CHROMEDRIVER))
    browser.set_page_load_timeout(60)
    browser.set_script_timeout(20)
    downloads = pathlib.Path(scratch) / "downloads"
    downloads.mkdir()
    browser.execute_cdp_cmd("Browser.setDownloadBehavior", {"behavior": "allow", "downloadPath": str(downloads)})
    try:
        yield browser, downloads
    finally:
        browser.quit()


class Page:
    """The dashboard in its iframe. Methods wait for what they ask for, within a time limit."""

    def __init__(self, browser, url, downloads):
        self.browser, self.url, self.downloads = browser, url, downloads

    def open(self, tiles=None, fresh=False, **view):
        """Opens a deep link to `view` and waits for `tiles` heat maps.

        Loading TensorBoard takes most of the time, so an open one is kept and only its iframe loaded anew, unless
        `fresh`. The page is that of time steps unless `view` names another; `page=None` opens the tab without a link.
        """
        link = f"{self.url}#gradient_flow"
        view = {"page": "flow", **view}
        if view["page"] is not None:
            link += "&p.gradient_flow.view=" + urllib.parse.quote(json.dumps(view), safe="")
        self.browser.switch_to.default_content()
        frames = self.all("iframe") if self.browser.current_url.startswith(self.url) else []
        if frames and not fresh:
            self.run("history.replaceState(history.state, '', arguments[0])", link)
            self.run("arguments[0].contentDocument.body.dataset.ready = ''", frames[0])
            self.run("arguments[0].contentWindow.location.reload()", frames[0])
        else:
            self.browser.get("about:blank")
            self.browser.get(link)
        return self.enter(tiles)

    def enter(self, tiles=None):
        self.browser.switch_to.default_content()
        frame = self.until(lambda: self.all("iframe[src*=gradient_flow], iframe"), "the iframe")[0]
        self.browser.switch_to.frame(frame)
        self.until(lambda: self.run("return document.body?.dataset.ready === 'true'"), "the dashboard")
        if tiles is not None:
            self.until_drawn(tiles)
        self.until_steady()
        return self

    def until_steady(self):
        """Waits until no answer has come and nothing has moved for a while: places measured from now on stay true."""
        self.browser.execute_async_script(STEADY)

    def until_drawn(self, tiles):
        self.until(
            lambda: self.run("return document.querySelector('.app').dataset.drawn") == str(tiles),
            f"{tiles} heat maps",
        )

    def until(self, condition, what, secs=40):
        end = time.monotonic() + secs
        while True:
            found = condition()
            if found:
                return found
            if time.monotonic() > end:
                text = self.run("return document.body ? document.body.innerText : ''")
                raise TimeoutError(f"{what} did not appear within {secs} s. The page says:\n{text}")
            time.sleep(0.05)

    def run(self, script, *arguments):
        return self.browser.execute_script(script, *arguments)

    def all(self, selector):
        return self.browser.find_elements("css selector", selector)

    def one(self, selector):
        return self.until(lambda: self.all(selector), selector)[0]

    def texts(self, selector):
        """Texts of what is visible; empty ones left out."""
        return self.run(
            "return [...document.querySelectorAll(arguments[0])].filter((found) => found.checkVisibility())"
            ".map((found) => found.innerText.trim()).filter(Boolean)",
            selector,
        )

    def button(self, text, within=""):
        return next(button for button in self.all(f"{within} button") if button.text == text)

    def tile(self, run, layer):
        return next(
            tile
            for tile in self.all(".tile")
            if (tile.get_attribute("data-run"), tile.get_attribute("data-layer")) == (run, layer)
        )

    def point(self, run, layer, column, step, *, time_steps, steps):
        """Moves the pointer to a cell; `steps` is the range of the y axis. Returns the plot."""
        plot = self.tile(run, layer).find_element("css selector", ".plot")
        self.run("arguments[0].scrollIntoView({block: 'center'})", plot)
        drawn = "return arguments[0].querySelector('canvas').style.width !== ''"
        self.until(lambda: self.run(drawn, plot), f"the heat map of {run}, {layer}")
        self.until_steady()
        size = plot.size
        x = LEFT + (size["width"] - LEFT - RIGHT) * (column + 0.5) / time_steps
        share = (step - steps[0]) / (steps[1] - steps[0])
        y = TOP + (size["height"] - TOP - BOTTOM) * (1 - share)
        self.move(plot, x, y)
        return plot

    def move(self, element, x, y):
        """Moves the pointer to a place inside an element, given from its upper left corner."""
        size = element.size
        chain = self.chain()
        chain.move_to_element_with_offset(element, round(x - size["width"] / 2), round(y - size["height"] / 2))
        chain.perform()

    def chain(self):
        from selenium.webdriver import ActionChains

        return ActionChains(self.browser, duration=0)

    def tooltip(self):
        return self.until(lambda: self.texts(".tooltip"), "the tooltip")[0].split("\n")

    def tooltip_at(self, selector, x, y):
        """The tooltip over a place of an element. Points again while the page still moves under the pointer."""

        def pointed():
            node = self.one(selector)
            self.run("arguments[0].scrollIntoView({block: 'center'})", node)
            self.move(node, x, y + 1)
            self.move(node, x, y)
            return self.texts(".tooltip")

        return self.until(pointed, "the tooltip")[0].split("\n")

    def pixel(self, canvas, x, y):
        """The colour of a canvas's pixel as #rrggbb; an `x` below 0 counts from the right edge as it is then."""
        red, green, blue, _ = self.run(
            "const [canvas, x, y] = arguments; const left = x < 0 ? x + canvas.width : x;"
            "return [...canvas.getContext('2d').getImageData(left, y, 1, 1).data]",
            canvas,
            x,
            y,
        )
        return f"#{red:02x}{green:02x}{blue:02x}"

    def downloaded(self, name, secs=10):
        path = self.downloads / name
        self.until(path.exists, f"the file {name}", secs)
        content = path.read_bytes()
        path.unlink()
        return content

    @contextlib.contextmanager
    def screen(self, width, theme):
        """A window of another width, in light or dark colours, as long as the block lasts."""
        metrics = {"width": width, "height": 850, "deviceScaleFactor": 1, "mobile": False}
        self.browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        media = {"features": [{"name": "prefers-color-scheme", "value": theme}]}
        self.browser.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
        try:
            yield
        finally:
            self.browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
            self.browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})
            self.run("localStorage.clear()")

    def violations(self):
        """What axe-core finds in the page, and whether it is wider than the window."""
        self.run(AXE.read_text())
        script = "const done = arguments[arguments.length - 1];"
        script += "axe.run(document).then((found) => done(found.violations.map("
        script += "({id, nodes}) => [id, nodes.map(({html}) => html.slice(0, 120))])))"
        found = self.browser.execute_async_script(script)
        wide = self.run("return document.documentElement.scrollWidth > innerWidth")
        return [*found, *(["wider than the window"] if wide else [])]

    def problems(self):
        """What the browser complained about that is our doing."""
        return [
            entry["message"]
            for entry in self.browser.get_log("browser")
            if entry["level"] == "SEVERE" and ("gradient_flow" in entry["message"] or "plugin" in entry["message"])
        ]
