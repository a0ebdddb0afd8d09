"""The page in a real browser: what it shows, that text stays text, keyboard, themes, phones."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.testclient import TestClient

from outrider.cluster.serve.metrics import EdgeMetrics
from outrider.cluster.serve.openai.calls import Edge
from outrider.cluster.serve.openai.engine_client import EngineClient
from outrider.cluster.serve.openai.routes import build_http
from outrider.config import EngineConfig
from outrider.engine.frontend import Frontend

from ....helpers.browser import Site, open_browser, prefer, resize, serving, until
from ....helpers.frontend import FakeEngine

CLIENT = "Bearer client"  # a key that may not see `/stats`
TEXT = '<img src=x onerror="window.broken=1"> & the cat\n'


@pytest.fixture(scope="module")
def site(tokenizer: Any, config: EngineConfig, limits: Any) -> Iterator[Site]:
    engine = FakeEngine(limits, tokenizer.encode(TEXT))
    app = build_http(Edge(EngineClient(engine), Frontend(config, limits), EdgeMetrics("tiny")))
    keys: set[str] = set()
    seen: list[str | None] = []

    async def check_key(request: Request, following: Any) -> Response:
        is_page = request.url.path == "/" or request.url.path.startswith("/page/")
        given = request.headers.get("authorization")
        seen.append(given)
        if keys and not is_page and given not in keys:
            return JSONResponse({"error": {"message": "no such key"}}, status_code=401)
        if given == CLIENT and request.url.path == "/stats":
            return JSONResponse({"error": {"message": "not yours"}}, status_code=403)
        return await following(request)

    app.add_middleware(BaseHTTPMiddleware, dispatch=check_key)
    with open_browser() as browser, serving(app) as url:
        yield Site(engine, browser, url, keys, seen)
    engine.shutdown()


@pytest.fixture(autouse=True)
def fresh(site: Site) -> None:
    site.keys.clear()
    resize(site.browser, 1280, 900)
    prefer(site.browser, "light")
    site.reset()
    site.browser.get_log("browser")


pytestmark = [pytest.mark.browser, pytest.mark.slow]


def test_every_token_is_shown_with_its_origin(site: Site) -> None:
    assert (site.text("#model"), site.text("#state")) == ("tiny", "ready")
    site.run()
    tokens = site.all("#output .token")
    assert len(tokens) == 30
    classes = [each.get_attribute("class").split()[1] for each in tokens]
    assert classes == ["origin-1", "origin-1", "origin-0"] * 10
    shown = site.text("#output")
    assert (TEXT * 10).startswith(shown)
    assert shown
    assert [each.text for each in site.all("#legend li")] == ["target 10", "fake 20", "rejected 10"]
    assert (site.tile("Tokens per step"), site.tile("Accepted")) == ("3.00", "67 %")
    row = [cell.text for cell in site.all("#history tbody td")][:7]
    assert row == ["1", "fake", "3.0", "30", "10", "3.00", "67 %"]
    assert site.text("#announcer") == "Done: 30 tokens in 10 steps, 3.00 tokens per step"
    bars = site.all("#chart-steps rect.bar-accepted")
    assert len(bars) == 10
    label = site.one("#chart-positions svg").get_attribute("aria-label")
    assert label == "Acceptance by position: 1: 100 %, 2: 100 %, 3: 0 %"
    assert site.errors() == []


def test_text_of_a_model_is_never_markup(site: Site) -> None:
    site.run(max_tokens=100)
    assert 'onerror="window.broken=1"> & the cat' in site.text("#output")
    assert site.script("return window.broken") is None
    assert site.all("#output img, #details img") == []
    with TestClient(build_http_only(site)) as client:
        for path in ("/", "/page/app.js", "/page/style.css"):
            answer = client.get(path)
            policy = answer.headers["content-security-policy"]
            assert "default-src 'none'" in policy
            assert "unsafe" not in policy
        assert client.get("/page/routes.py").status_code == 404
        assert client.get("/page/..%2Froutes.py").status_code == 404
        assert client.get("/page/" + "a" * 300 + ".js").status_code == 404


def build_http_only(site: Site) -> Any:
    from starlette.applications import Starlette

    from outrider.cluster.serve.openai.routes import page_routes

    app = Starlette()
    app.router.routes.extend(page_routes())
    return app


def test_the_draft_of_a_step_by_pointer_and_keyboard(site: Site) -> None:
    from selenium.webdriver import ActionChains, Keys

    site.run(max_tokens=9)
    tokens = site.all("#output .token")
    ActionChains(site.browser).move_to_element(tokens[4]).perform()
    until(lambda: site.one("#details").is_displayed())
    assert site.text("#details strong") == "Step 1: 3 tokens"
    marks = [each.get_attribute("class").split()[0] for each in site.all("#details li")]
    assert marks == ["accepted", "accepted", "rejected"]
    assert site.text("#details li.rejected code") == "<"
    ActionChains(site.browser).move_to_element(site.one("h1")).perform()
    until(lambda: not site.one("#details").is_displayed())

    site.script("arguments[0].focus()", tokens[0])
    for key, step in ((Keys.ARROW_DOWN, 1), (Keys.END, 2), (Keys.ARROW_UP, 1), (Keys.HOME, 0)):
        site.browser.switch_to.active_element.send_keys(key)
        assert site.text("#details strong").startswith(f"Step {step}:")
    site.browser.switch_to.active_element.send_keys(Keys.ARROW_RIGHT)
    assert site.script("return document.activeElement === arguments[0]", tokens[1])
    assert [each.get_attribute("tabindex") for each in tokens].count("0") == 1
    site.browser.switch_to.active_element.send_keys(Keys.ESCAPE)
    assert not site.one("#details").is_displayed()


def test_settings_reach_the_engine_and_plain_decoding_is_compared(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = len(site.engine.submitted)
    for name, value in (("seed", "7"), ("temperature", "0.5"), ("max_draft_len", "2")):
        site.write(f"#{name}", value)
    site.one("#shared").click()
    monkeypatch.setattr(site.engine, "pause_s", 0.02)  # all at once would have no rate
    site.run("#compare")
    drafted, plain = site.engine.submitted[before:]
    assert (drafted.seed, drafted.sampling.temperature) == (7, 0.5)
    assert (drafted.speculation.enabled, drafted.speculation.max_draft_len) == (True, 2)
    assert (plain.speculation.enabled, plain.seed) == (False, 7)
    assert drafted.speculation.isolated, "it must not replay what a drafter has stored"
    assert plain.speculation.isolated, "nor leave to be replayed what it writes"
    assert site.tile("Measured speedup").endswith("×")
    assert "same text" in site.text("#figures")
    assert "against plain" in site.text("#figures")
    assert [site.one(f"#output{each}").text != "" for each in ("", "-2")] == [True, True]
    assert site.text("#output-title-2").startswith("Plain decoding: ")
    site.run()
    assert not site.engine.submitted[-1].speculation.isolated, "as it was asked for"
    assert not site.one("#pane-2").is_displayed()
    assert not site.one("#system").is_displayed()
    site.choose("#kind", "chat")
    assert site.one("#system").is_displayed()
    site.run()
    prompt = site.engine.submitted[-1].prompt.tolist()
    assert len(prompt) > len(drafted.prompt), "the chat template was applied"


def test_a_fresh_request_is_isolated(site: Site) -> None:
    site.run()
    assert site.engine.submitted[-1].speculation.isolated


def test_two_drafters_side_by_side(site: Site) -> None:
    options = [each.get_attribute("value") for each in site.all("#drafter option")]
    assert options == ["", "fake", "other", "off"]
    site.choose("#drafter", "other")
    site.choose("#against", "fake")
    site.script(  # a screen slow after the first: what it draws late must not hide the comparison
        "const rows = () => document.querySelectorAll('#history tbody tr').length;"
        "window.requestAnimationFrame = (draw) => setTimeout(draw, rows() ? 500 : 0);"
        "window.cancelAnimationFrame = clearTimeout"
    )
    site.run("#compare")
    time.sleep(0.6)
    first, second = site.engine.submitted[-2:]
    assert (first.speculation.drafters, second.speculation.drafters) == (("other",), ("fake",))
    titles = [site.text(f"#output-title{each}").split(":")[0] for each in ("", "-2")]
    assert titles == ["other", "fake"]
    assert len(site.all("#output .token")) == len(site.all("#output-2 .token")) == 30
    assert "against fake, same text" in site.text("#figures")
    site.picture("compare-two-drafters")
    assert site.errors() == []


def test_all_sampling_fields_reach_the_engine(site: Site) -> None:
    site.one("#more summary").click()
    given = {
        "top_p": 0.9, "top_k": 7, "min_p": 0.1, "min_tokens": 3, "repetition_penalty": 1.1,
        "presence_penalty": 0.5, "frequency_penalty": -0.5,
    }  # fmt: skip
    for name, value in given.items():
        site.write(f"#{name}", str(value))
    site.write("#stop", "zebra\nyak")
    site.one("#ignore_eos").click()
    site.write("#extra", '{"logit_bias": {"42": -100}, "bad_words": ["emu"]}')
    site.run()
    sampling = site.engine.submitted[-1].sampling
    assert {name: getattr(sampling, name) for name in given} == given
    assert (sampling.stop, sampling.ignore_eos) == (("zebra", "yak"), True)
    assert (sampling.logit_bias, sampling.bad_words) == ({42: -100.0}, ("emu",))
    site.write("#extra", "[1]")
    site.one("#run").click()
    until(lambda: "a JSON object is needed" in site.text("#problem"))


def prompt_of(site: Site, tokenizer: Any) -> str:
    return tokenizer.decode(site.engine.submitted[-1].prompt)


def test_a_conversation_of_several_turns_is_kept(site: Site, tokenizer: Any) -> None:
    site.script("localStorage.clear()")
    site.open()
    assert site.one("#kind").get_property("value") == "chat", "the model has a chat template"
    site.write("#system", "be brief")
    for message in ("one", "two"):
        site.write("#prompt", message)
        site.run(max_tokens=3)
        until(lambda: site.one("#prompt").get_property("value") == "")
    answer = site.text("#output")
    wanted = f"<system>be brief\n<user>one\n<assistant>{answer}\n<user>two\n<assistant>"
    assert prompt_of(site, tokenizer) == wanted
    assert [each.get_attribute("class") for each in site.all("#turns li")] == [
        "user", "assistant", "user", "assistant",
    ]  # fmt: skip
    site.picture("conversation")
    site.open()  # a reload
    assert site.one("#system").get_property("value") == "be brief"
    assert len(site.all("#turns li")) == 4
    assert [row.text.split()[0] for row in site.all("#history tbody tr")] == ["2", "1"]
    site.run(max_tokens=3)  # an empty message repeats the last
    assert prompt_of(site, tokenizer) == wanted
    assert len(site.all("#turns li")) == 4
    site.one("#undo").click()
    assert site.one("#prompt").get_property("value") == "two"
    assert len(site.all("#turns li")) == 2
    site.one("#new").click()
    assert not site.one("#conversation").is_displayed()
    site.one("#clear").click()
    assert not site.one("#history-card").is_displayed()


def test_a_link_holds_the_request_and_no_key(site: Site) -> None:
    site.one("#key").send_keys("secret")
    site.write("#prompt", "a ‹cat› & 100 %")
    site.write("#seed", "77")
    site.choose("#drafter", "other")
    site.one("#share").click()
    until(lambda: site.text("#announcer") == "Link copied")
    link = site.browser.current_url
    assert "#playground?" in link
    assert "secret" not in link
    site.script("localStorage.clear()")
    site.open(link.removeprefix(site.url))
    assert site.one("#prompt").get_property("value") == "a ‹cat› & 100 %"
    assert site.one("#seed").get_property("value") == "77"
    assert site.one("#kind").get_property("value") == "completion"
    until(lambda: site.one("#drafter").get_property("value") == "other")
    assert site.browser.current_url.endswith("#playground"), "a reload keeps later changes"
    site.open("/#playground?%7Bbroken")
    assert site.one("#seed").get_property("value") == "77"
    assert site.errors() == []


def test_the_output_is_copied(site: Site) -> None:
    assert not site.one("#copy").is_enabled()
    site.run()
    site.script("navigator.clipboard.writeText = async (text) => { window.copied = text; }")
    site.one("#copy").click()
    until(lambda: site.text("#announcer") == "Output copied")
    assert (TEXT * 10).startswith(site.script("return window.copied"))
    assert len(site.script("return window.copied")) > 20


def test_stop_and_errors(site: Site) -> None:
    site.engine.pause_s = 0.2
    try:
        site.write("#max_tokens", "120")
        site.one("#run").click()
        until(lambda: site.all("#output .token"))
        site.one("#stop-run").click()
        until(lambda: site.one("#run").is_enabled())
    finally:
        site.engine.pause_s = 0.0
    until(lambda: site.engine.stats()["running"] == 0)
    assert not site.one("#problem").is_displayed()
    # What is known of its drafts is shown all the same.
    assert (site.tile("Drafter"), site.tile("Tokens per step")) == ("fake", "3.00")
    assert site.tile("Accepted") == "67 %"
    assert site.text("#output-title").endswith(", stopped")
    assert site.text("#history tbody tr td:nth-child(2)") == "fake"
    site.write("#max_tokens", "100000")
    site.one("#run").click()
    until(lambda: site.one("#problem").is_displayed())
    assert "max_tokens" in site.text("#problem")


def test_the_live_view(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    stats = site.engine.stats()
    health = {"state": "disabled", "reason": "too <few> accepted", "last_fault": "propose: x"}
    stats["drafters"]["fake"].update(health=health, faults=2)
    stats["kv"].update(num_free_blocks=6)
    costs = {"1": {"0": 2.0, "1": 2.5, "5": 3.0}, "8": {"0": 4.0, "1": 6.0, "5": 9.0}}
    adaptive = {"gain": 1.5, "step_ms": costs}
    stats["speculation"] = {"enabled": True, "max_draft_len": 5, "adaptive": adaptive}
    stats["newest_requests"] = [
        {"id": "cmpl-1", "age_s": 2.0, "num_prompt_tokens": 4, "num_output_tokens": 9,
         "drafter": "fake", "num_steps": 3, "num_drafts": 3, "num_draft_tokens": 9,
         "num_accepted_tokens": 6},
    ]  # fmt: skip
    monkeypatch.setattr(site.engine, "stats", lambda: stats)
    site.one("#tab-live").click()
    assert not site.one("#playground").is_displayed()
    until(lambda: site.tile("KV cache in use", "#live-tiles") == "25 %")
    assert site.text("#drafters .pill") == "disabled"
    assert "too <few> accepted" in site.text("#drafters tbody")
    assert "propose: x" in site.text("#drafters tbody")
    row = [cell.text for cell in site.all("#requests tbody td")]
    costs = [cell.text for cell in site.all("#costs tbody td")]
    assert costs == ["1", "2.00 ms", "1: 1.25 · 5: 1.50", "8", "4.00 ms", "1: 1.50 · 5: 2.25"]
    assert site.tile("Expected gain", "#live-tiles") == "1.50"
    assert row == ["cmpl-1", "2.0 s", "4", "9", "fake", "3.0", "3.00", "67 %"]
    assert site.one("#max_draft_len").get_attribute("placeholder") == "engine's 5"
    stats["recovering"] = "a rank died"
    until(lambda: site.text("#state") == "workers restart")
    stats["requests"]["num_output_tokens"] = 100
    stats["steps"]["num_sampled"] = 50
    until(lambda: "peak 0" not in site.text("#spark-throughput"))
    assert site.errors() == []


def test_a_key_is_asked_for_and_sent(site: Site) -> None:
    site.keys.add("Bearer secret")
    until(lambda: site.text("#state") == "API key needed")
    site.one("#run").click()
    until(lambda: site.one("#problem").is_displayed())
    assert site.script("return document.activeElement.id") == "key"
    site.one("#key").send_keys("secret")
    until(lambda: site.text("#state") == "ready")
    site.run()
    assert "Bearer secret" in site.seen
    stored = site.script("return JSON.stringify([{...localStorage}, {...sessionStorage}])")
    assert "secret" not in stored + site.script("return document.cookie")


def test_a_clients_key_is_enough_for_the_playground(site: Site) -> None:
    site.keys.update({CLIENT, "Bearer secret"})
    site.one("#key").send_keys("client")
    until(lambda: site.text("#live-note") == "The live view needs an administrator's key.")
    until(lambda: (site.text("#state"), site.text("#model")) == ("ready", "tiny"))
    site.run()
    assert site.tile("Tokens per step") == "3.00"
    site.one("#key").clear()
    site.one("#key").send_keys("secret")
    until(lambda: site.script("return document.getElementById('live-note').hidden"))


def test_themes_and_tabs(site: Site) -> None:
    from selenium.webdriver import Keys

    def ground() -> str:
        return site.script("return getComputedStyle(document.body).backgroundColor")

    light = ground()
    prefer(site.browser, "dark")
    dark = until(lambda: ground() != light and ground())
    site.one("#theme").click()
    assert (ground(), site.one("#theme").get_attribute("aria-label")) == (light, "Theme: light")
    site.open()
    assert ground() == light, "it is kept"
    site.one("#theme").click()
    assert ground() == dark
    site.one("#theme").click()
    site.one("#tab-playground").send_keys(Keys.ARROW_RIGHT)
    assert site.one("#live").is_displayed()
    assert site.one("#tab-live").get_attribute("aria-selected") == "true"
    assert site.script("return document.activeElement.id") == "tab-live"
    unnamed = site.script(
        "return [...document.querySelectorAll('input,select,textarea,button')].filter("
        "e => !e.labels?.length && !e.textContent.trim() && !e.ariaLabel).map(e => e.id)"
    )
    assert unnamed == []


def test_a_phone_shows_everything_without_sideways_scrolling(site: Site) -> None:
    resize(site.browser, 360, 740, mobile=True)
    site.open()
    site.run()
    site.script("arguments[0].focus()", site.all("#output .token")[5])
    for tab in ("#tab-playground", "#tab-live"):
        site.one(tab).click()
        width = site.script("return document.documentElement.scrollWidth")
        assert width <= 360, tab
