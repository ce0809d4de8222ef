"""The status page of a real cluster under a real training load, in a headless Chromium.

What this would catch: a page that throws, asks for what is not there or asks elsewhere; charts that stand still while a
trainer runs; a dead shard or coordinator that looks alive; controls that only a mouse can reach; text that is too faint
in light or dark; names that become markup; a page that does not fit a telephone.

usage: status_page_test.py EMBERD PROTO_FOLDER PICTURES_FOLDER [unittest options]
       status_page_test.py EMBERD PROTO_FOLDER PICTURES_FOLDER --readme-images FOLDER   (instead of testing, makes those)

Leaves PNGs in PICTURES_FOLDER. Exit status 77: there is no Chromium, so nothing was tested.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
import time
import unittest

import browser
import cluster
from page_checks import CHARTS_WITHOUT_VALUES, CUT_LABELS, CUT_OFF, FAINT_TEXT, HIDDEN_WITHOUT_A_SIGN, NAMELESS

EMBERD, PROTOS, PICTURES = sys.argv[1:4]
del sys.argv[1:4]
HERE = os.path.dirname(os.path.abspath(__file__))
PAGE_SOURCES = os.path.join(HERE, "../../server/status_page/page")

FOCUS = """(() => { const at = document.activeElement;
  return {id: at.id, tag: at.tagName, class: at.getAttribute('class') ?? '', text: at.textContent.slice(0, 40),
          outline: getComputedStyle(at).outlineStyle, label: at.getAttribute('aria-label') ?? ''}; })()"""


def chart(title):
    """A JavaScript expression for the figure of that title."""
    return f"[...document.querySelectorAll('figure')].find((f) => f.querySelector('h3').textContent === {json.dumps(title)})"


def line(title):
    """A JavaScript expression for the first line of that chart, as path commands."""
    return f"{chart(title)}.querySelector('.lines .line.main:not(.dashed)').getAttribute('d')"


class Load:
    """A trainer, as a process."""

    def __init__(self, address):
        self.process = subprocess.Popen([sys.executable, "-B", os.path.join(HERE, "trainer.py"), address, PROTOS],
                                        stdin=subprocess.PIPE, stderr=subprocess.DEVNULL)

    def stop(self):
        self.process.stdin.close()
        try:
            self.process.wait(30)
        finally:
            self.process.kill()
            self.process.wait()


class StatusPageTest(unittest.TestCase):
    """Its cases share a cluster and a browser, and run in the order of their names."""

    @classmethod
    def setUpClass(cls):
        os.makedirs(PICTURES, exist_ok=True)
        folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        cls.addClassCleanup(folder.cleanup)
        cls.cluster = cluster.Cluster(EMBERD, folder.name)
        cls.addClassCleanup(cls.cluster.stop)
        cls.browser = browser.Browser(folder.name)
        cls.addClassCleanup(cls.browser.close)
        cls.load = None

        def stop_load():
            if cls.load:
                cls.load.stop()
        cls.addClassCleanup(stop_load)

    def open(self, **options):
        page = self.browser.open(self.cluster.url, **options)
        self.addCleanup(page.close)
        page.wait("document.querySelector('#state').textContent === 'serving' && document.querySelectorAll('.tile').length > 0")
        return page

    def open_under_load(self, **options):
        if not type(self).load:
            type(self).load = Load(self.cluster.coordinator.grpc)
        page = self.open(**options)
        page.wait("document.querySelectorAll('.stack').length === 3")
        page.wait("document.querySelectorAll('#groups tbody tr').length === 1")
        page.wait("document.querySelector('.tile .big').textContent.match(/[1-9]/)")
        return page

    def picture(self, page, name, **options):
        page.screenshot(os.path.join(PICTURES, f"{name}.png"), **options)

    def check_calm(self, page):
        """Nothing has gone wrong in the page, and it has asked nobody but the coordinator."""
        self.assertEqual(page.complaints, [])
        for url in page.requests:
            self.assertTrue(url.startswith((self.cluster.url, "about:")), url)

    def number(self, page, script):
        """The leading number of a text such as 3.45k/s."""
        text = page.eval(script)
        found = re.match(r"([\d.,]+)([kM]?)", text)
        self.assertTrue(found, text)
        return float(found[1].replace(",", "")) * {"": 1, "k": 1e3, "M": 1e6}[found[2]]

    def test_0_before_any_model_it_says_so(self):
        page = self.open()
        self.assertEqual(page.eval("document.querySelectorAll('.shard').length"), 4)
        self.assertIn("No model yet", page.text("#models"))
        self.assertIn("No lookups yet", page.text("#hot"))
        self.assertIn("No training group", page.text("#groups"))
        self.assertEqual(page.eval("document.title"), "emberd coordinator-0")
        self.picture(page, "empty")
        self.check_calm(page)

    def test_1_what_is_served_is_what_was_written(self):
        page = self.open()
        for name in sorted(os.listdir(PAGE_SOURCES)):
            path = "/" if name == "index.html" else f"/{name}"
            served = page.eval(f"fetch({json.dumps(path)}).then((answer) => answer.text())")
            with open(os.path.join(PAGE_SOURCES, name)) as file:
                self.assertEqual(served, file.read(), name)

    def test_1b_a_coordinator_that_is_back_counts_from_then_on(self):
        """Would catch: no lookups per second for a while, counted from 1970 on."""
        page = self.open()
        rate = page.eval("""import('/history.js').then(({History}) => {
            const history = new History(60);
            const at = (time, batches) => history.lookupsOf({name: 'c', reachable: time > 0, stats: {time_ms: String(time),
                uptime_ms: String(time), stacks: time > 0 ? [{model: 'm', stack: 's', batches: String(batches)}] : []}});
            at(10000, 100);
            at(0, 0);
            at(20000, 0);
            return at(21000, 50);
        })""")
        self.assertEqual(rate, 50)

    def test_2_charts_move_while_a_trainer_runs(self):
        page = self.open_under_load(width=1440)
        for title in ("Steps per second", "Rows per second", "Bytes per second", "Latency"):
            page.wait(f"{line(title)}.split('L').length > 2")
            before = page.eval(line(title))
            page.wait(f"{line(title)} !== {json.dumps(before)}")
        page.wait("document.querySelector('.tile .big').textContent.match(/[1-9]/)")
        for shard in range(4):
            page.wait(f"document.querySelectorAll('.shard .facts dd')[{8 * shard}].textContent.match(/[1-9]/)")
        total = "Number(document.querySelector('#groups tbody td:nth-child(3)').textContent.replaceAll(',', ''))"
        page.wait(f"{total} > {page.eval(total)}")
        self.assertIn("EmbeddingService/Lookup", page.text("#methods"))
        self.check_calm(page)

    def test_3_light_and_dark_can_be_read(self):
        page = self.open_under_load(width=1440)
        grounds = {}
        for scheme in ("light", "dark"):
            page.prefer(color_scheme=scheme, reduced_motion="reduce")
            page.wait(f"matchMedia('(prefers-color-scheme: {scheme})').matches")
            grounds[scheme] = page.eval("getComputedStyle(document.documentElement).backgroundColor")
            self.assertEqual(page.eval(FAINT_TEXT), [], scheme)
            self.picture(page, scheme)
        self.assertNotEqual(grounds["light"], grounds["dark"])
        self.assertEqual(page.eval("getComputedStyle(document.querySelector('.meter i')).transitionDuration"), "0s")
        # The button goes over what the system prefers, and is remembered.
        page.eval("document.querySelector('#theme').click()")
        self.assertEqual(page.text("#theme"), "Theme: light")
        self.assertEqual(page.eval("getComputedStyle(document.documentElement).backgroundColor"), grounds["light"])
        page.call("Page.reload")
        page.wait("document.querySelector('#theme')?.textContent === 'Theme: light'")
        self.check_calm(page)

    def test_4_everything_works_from_the_keyboard(self):
        page = self.open_under_load()
        page.wait(f"{line('Steps per second')}.split('L').length > 4")
        seen = []
        while not (seen and seen[-1]["text"] == "/healthz"):
            self.assertLess(len(seen), 80, seen)
            page.key("Tab")
            seen.append(page.eval(FOCUS))
            self.assertNotEqual(seen[-1]["outline"], "none", seen[-1])
            self.use_with_keys(page, seen[-1])
        self.assertEqual(seen[0]["class"], "skip")
        ids = [at["id"] for at in seen]
        self.assertLess(ids.index("window"), ids.index("theme"))
        texts = [at["text"] for at in seen]
        for shard in range(4):
            self.assertIn(f"Shard {shard}", texts)
        self.assertEqual(len([at for at in seen if at["class"].startswith("plot")]), 5)
        self.assertEqual(len([at for at in seen if at["class"].startswith("segment")]), 3)
        for label in ("Methods", "Training groups"):
            self.assertIn(label, [at["label"] for at in seen])
        self.assertEqual(page.eval(NAMELESS), [])
        self.check_calm(page)

    def use_with_keys(self, page, at):
        """Does with what has the focus what it is for."""
        if at["id"] == "theme":
            page.key("Enter")
            self.assertEqual(page.text("#theme"), "Theme: light")
        elif at["text"] == "Shard 1":
            page.key("Enter")
            self.assertFalse(page.eval("document.querySelector('#shard-1-details').hidden"))
            self.assertEqual(page.eval("document.activeElement.getAttribute('aria-expanded')"), "true")
            page.key("Enter")
            self.assertTrue(page.eval("document.querySelector('#shard-1-details').hidden"))
        elif at["label"].startswith("Steps per second. Now: lookups"):
            page.key("ArrowLeft")
            page.key("ArrowLeft")
            self.assertIn("lookups", page.eval(f"{chart('Steps per second')}.querySelector('.tip').textContent"))
            self.assertRegex(page.eval(f"{chart('Steps per second')}.querySelector('[aria-live]').textContent"),
                             r"s ago: lookups [\d.]+k?, updates [\d.]+")
        elif at["text"] == "Data of Steps per second":
            page.key("Enter")
            rows = f"{chart('Steps per second')}.querySelectorAll('tbody tr').length"
            page.wait(f"{rows} > 2")
            self.assertEqual(page.eval(f"{chart('Steps per second')}.querySelector('tbody th').textContent"), "now")
            page.key("Enter")
            page.wait(f"!{chart('Steps per second')}.querySelector('details').open")
        elif at["class"].startswith("segment") and at["text"].startswith("user"):
            page.key("ArrowRight")
            self.assertRegex(page.eval("document.activeElement.getAttribute('aria-label')"), r"^item: rows 150,000 · padded")
            self.assertRegex(page.text(".stack .readout"), r"^item rows 150,000 · .* · rotation \d+ · features 2 ")

    def test_5_fits_a_telephone_and_a_wide_screen(self):
        page = self.open_under_load()
        for width in (360, 768, 2560):
            page.resize(width, 900)
            page.wait(f"document.documentElement.clientWidth === {width}")
            page.wait(f"document.documentElement.scrollWidth <= {width}")  # charts are drawn anew
            page.wait(f"({CUT_OFF}).length === 0")
            self.picture(page, f"width_{width}")
        self.check_calm(page)

    def test_5b_what_was_before_a_reload_is_there_after_it(self):
        """And looks well: whole pages in both themes, on a screen and on a telephone, with values on every chart."""
        page = self.open_under_load(width=1360)
        points = f"{line('Steps per second')}.split('L').length"
        page.wait(f"{points} > 30")
        for width in (1360, 380):
            page.resize(width, 900)
            for scheme in ("light", "dark"):
                page.prefer(color_scheme=scheme)
                page.wait(f"matchMedia('(prefers-color-scheme: {scheme})').matches")
                page.eval("window.beforeReload = true")
                page.call("Page.reload")
                page.wait("!window.beforeReload && document.querySelector('#state')?.textContent === 'serving'")
                page.wait("document.querySelectorAll('.stack').length === 3")
                # At once, not when the page has collected them anew.
                self.assertGreater(page.eval(points), 30, f"{width} {scheme}")
                page.wait("document.querySelectorAll('.stages li').length > 3")
                self.assertEqual(page.eval(CHARTS_WITHOUT_VALUES), [], f"{width} {scheme}")
                self.assertEqual(page.eval(CUT_LABELS), [], f"{width} {scheme}")
                self.assertEqual(page.eval(CUT_OFF), [], f"{width} {scheme}")
                page.wait(f"{HIDDEN_WITHOUT_A_SIGN}.length === 0")  # the page marks its tables in a later frame
                self.assertEqual(page.eval(FAINT_TEXT), [], f"{width} {scheme}")
                self.picture(page, f"after_reload_{width}_{scheme}")
        print("pictures:", PICTURES)
        page.eval("document.querySelector('#window').value = '3600'")
        page.eval("document.querySelector('#window').dispatchEvent(new Event('change'))")
        self.assertGreater(page.eval(points), 30)
        self.check_calm(page)

    def test_5c_without_calls_the_chart_of_latencies_says_how_many_there_were(self):
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            calm = cluster.Cluster(EMBERD, folder, shards=1)
            self.addCleanup(calm.stop)
            bench = os.path.join(os.path.dirname(EMBERD), "..", "bench", "emberd_bench")
            with open(os.path.join(folder, "model"), "w") as file:
                file.write('name: "bench" tables { name: "t" vocabulary_size: 100 embedding_dim: 8 } '
                           'features { name: "f" table: "t" batch_size: 4 }')
            subprocess.run([bench, "load", "-a", calm.coordinator.grpc, "--config", os.path.join(folder, "model"),
                            "--seconds", "1"], check=True, timeout=120, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            page = self.browser.open(calm.url)
            self.addCleanup(page.close)
            page.wait("document.querySelectorAll('#methods tbody tr').length > 0")
            self.assertTrue(page.eval("document.querySelector('#methods > .nothing').hidden"))
            page.eval("document.querySelector('#window').value = '60'")
            nothing = f"{chart('Latency')}.querySelector('.nothing')"
            page.eval("document.querySelector('#window').dispatchEvent(new Event('change'))")
            page.wait(f"!{nothing}.hidden", 240)  # the calls are out of sight
            self.assertRegex(page.eval(f"{nothing}.textContent"), r"^No Lookup or ApplyGradients call in this time; [\d,]+ since the start")
            calm.stop()

    def test_5d_several_coordinators(self):
        for secure in (False, True):
            with self.subTest(secure=secure), tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
                self.several_coordinators(folder, secure)

    def several_coordinators(self, folder, secure):
        both = cluster.Cluster(EMBERD, folder, shards=1 if secure else 4, coordinators=2, tokens=secure)
        self.addCleanup(both.stop)
        page = self.browser.open(both.url)
        self.addCleanup(page.close)
        if secure:
            page.wait("document.activeElement.id === 'token'")
            page.call("Input.insertText", text=both.reader_token)
            page.key("Enter")
        page.wait("document.querySelectorAll('.coordinator:not(.down)').length === 2")
        self.assertIn("2 coordinators", page.text("#coordinators-note"))
        self.assertEqual(page.eval("[...document.querySelectorAll('.coordinator a')].map((link) => link.getAttribute('href'))"),
                         [None, f"http://{both.coordinators[1].http}/"])
        if not secure:
            load = Load(both.coordinators[1].grpc)  # the other one
            try:
                page.wait("document.querySelectorAll('#groups tbody tr').length === 1")
                page.wait("document.querySelector('.tile .big').textContent.match(/[1-9]/)")
                page.wait(f"{line('Steps per second')}.split('L').length > 4")
                self.picture(page, "two_coordinators")
            finally:
                load.stop()
        both.coordinators[1].kill()
        page.wait("document.querySelectorAll('.coordinator.down').length === 1")
        self.assertIn("out of reach: coordinator-1", page.text("#coordinators-note"))
        self.assertNotEqual(page.text(".coordinator.down .reason"), "")
        both.coordinators[1].start()
        page.wait("document.querySelectorAll('.coordinator:not(.down)').length === 2")
        both.stop()

    def test_6_names_never_become_markup(self):
        page = self.open_under_load()
        evil = "<img src=x onerror=\"document.title='broken in'\"><script>document.title='broken in'</script>"
        doctored = {path: page.eval(f"fetch('{path}').then((answer) => answer.json())")
                    for path in ("/status.json", "/models.json")}

        def replace(value):
            if isinstance(value, dict):
                return {key if key in ("OK",) or not key.isdigit() else evil: replace(one) for key, one in value.items()}
            if isinstance(value, list):
                return [replace(one) for one in value]
            if isinstance(value, str) and not re.fullmatch(r"-?[\d.e+-]+|Infinity|https?:.*", value):
                return evil
            return value
        doctored = {path: replace(value) for path, value in doctored.items()}
        doctored["/status.json"]["stats"]["shards"][1].update(reachable=False, error=evil)
        evil_page = self.browser.open(self.cluster.url, doctored=doctored)
        self.addCleanup(evil_page.close)
        evil_page.wait("document.querySelectorAll('.shard.down').length === 1")
        evil_page.wait("document.querySelectorAll('.segment').length > 0")
        self.assertIn(evil, evil_page.text(".shard.down .reason"))
        self.assertIn(evil, evil_page.text("#models"))
        self.assertEqual(evil_page.eval("document.title"), f"emberd {evil}")
        self.assertEqual(evil_page.eval("document.querySelectorAll('main img, main script').length"), 0)
        self.check_calm(evil_page)

    def test_6b_a_model_that_comes_back_by_itself_says_so(self):
        """Would catch: an operator who is told to reset a model whose rows are being restored."""
        page = self.open_under_load()
        doctored = {path: page.eval(f"fetch('{path}').then((answer) => answer.json())")
                    for path in ("/status.json", "/models.json")}
        doctored["/models.json"]["models"][0].update(lost="reset it", recovery="it goes back")
        page = self.browser.open(self.cluster.url, doctored=doctored)
        self.addCleanup(page.close)
        page.wait("document.querySelectorAll('.segment').length > 0")
        self.assertIn("it goes back", page.text("#models"))
        self.assertNotIn("reset it", page.text("#models"))
        self.check_calm(page)

    def test_6c_a_model_that_is_missing_is_asked_for_again(self):
        """Would catch: an answer that is older than that of the status, and is kept until something changes."""
        self.open_under_load()
        page = self.browser.open(self.cluster.url, doctored={"/models.json": {"models": []}})
        self.addCleanup(page.close)
        asked = "performance.getEntriesByType('resource').filter((one) => one.name.endsWith('/models.json')).length"
        page.wait(f"{asked} > 2")

    def test_7_a_killed_shard_is_marked_with_the_reason(self):
        page = self.open_under_load(width=1440)
        self.cluster.shards[2].kill()
        page.wait("[...document.querySelectorAll('.shard.down')].map((shard) => shard.textContent).join().match(/Shard 2/)")
        page.wait("document.querySelectorAll('.shard.down').length === 1")  # others may be silent for a second
        page.wait("document.querySelector('.shard.down .reason').textContent.match(/connect/i)")
        self.assertIn("out of reach: shard 2", page.text("#cluster-note"))
        page.wait("document.querySelector('.tile.bad .big')?.textContent.match(/of 4|[1-9]/)")
        page.wait(f"{chart('Errors per second')}.querySelector('.legend').textContent.includes('UNAVAILABLE')")
        self.assertEqual(page.eval(FAINT_TEXT), [])
        self.picture(page, "shard_killed")
        self.cluster.shards[2].start()
        page.wait("document.querySelectorAll('.shard.down').length === 0")
        # Its rows are gone, and nobody trains on until an operator gives them up.
        emberctl = os.path.join(os.path.dirname(EMBERD), "emberctl")
        subprocess.run([emberctl, "model", "reset", "ads_ranker", "--address", self.cluster.coordinator.grpc],
                       check=True, timeout=120)
        page.wait("document.querySelector('.tile .big').textContent.match(/[1-9]/)")
        self.check_calm(page)

    def test_8_a_lost_coordinator_shows_and_is_found_again(self):
        page = self.open_under_load()
        self.check_calm(page)
        self.cluster.coordinator.kill()
        page.wait("!document.querySelector('#banner').hidden")
        self.assertIn("Connection lost, retrying", page.text("#banner"))
        self.assertEqual(page.text("#state"), "no connection")
        self.picture(page, "connection_lost", whole=False)
        self.cluster.coordinator.start()
        page.wait("document.querySelector('#banner').hidden")
        self.assertEqual(page.text("#state"), "serving")
        # The trainer goes on, and so do the charts.
        page.wait("document.querySelector('.tile .big').textContent.match(/[1-9]/)")
        # Browsers put each failed request into the console themselves; nothing else may be there.
        strange = [text for text in page.complaints if not re.search("ERR_CONNECTION_(REFUSED|RESET)|ERR_EMPTY_RESPONSE", text)]
        self.assertEqual(strange, [])


    def test_9_asks_for_a_token_where_one_is_needed(self):
        with tempfile.TemporaryDirectory() as folder:
            closed = cluster.Cluster(EMBERD, folder, shards=1, tokens=True)
            self.addCleanup(closed.stop)
            page = self.browser.open(closed.url)
            self.addCleanup(page.close)
            page.wait("document.activeElement.id === 'token'")
            self.assertEqual(page.text("#state"), "closed")
            self.assertFalse(page.eval("document.querySelector('main').checkVisibility()"))
            self.assertEqual(page.eval(FAINT_TEXT), [])
            self.picture(page, "token", whole=False)
            page.call("Input.insertText", text="a token that nobody has")
            page.key("Enter")
            page.wait("document.querySelector('#refusal').textContent.startsWith('Refused: 401')")
            page.eval("document.querySelector('#token').value = ''")
            page.call("Input.insertText", text=closed.reader_token)
            page.key("Enter")
            page.wait("document.querySelector('#state').textContent === 'serving'")
            page.wait("document.querySelectorAll('.shard:not(.down)').length === 1")
            self.assertTrue(page.eval("document.querySelector('main').checkVisibility()"))
            self.assertFalse(page.eval("document.querySelector('#login').checkVisibility()"))
            self.assertEqual([text for text in page.complaints if "401" not in text], [])
            closed.stop()


def make_readme_images(folder):
    """status_light.png and status_dark.png: what is in view of a busy cluster after two minutes."""
    test = StatusPageTest()
    StatusPageTest.setUpClass()
    try:
        page = test.open_under_load(width=1360, height=800)
        page.wait("document.querySelector('.frame .grid').textContent.includes('−2 min')", 200)
        time.sleep(55)  # what is shown is nearly full
        for scheme in ("light", "dark"):
            page.prefer(color_scheme=scheme)
            time.sleep(1)
            page.screenshot(os.path.join(folder, f"status_{scheme}.png"), whole=False)
    finally:
        StatusPageTest.doClassCleanups()


if __name__ == "__main__":
    if browser.find() is None:
        print("skipped: the status page is tested in Chromium, which is not here (Debian package: chromium)")
        sys.exit(77)
    if sys.argv[1:2] == ["--readme-images"]:
        make_readme_images(sys.argv[2])
    else:
        unittest.main(verbosity=2)
