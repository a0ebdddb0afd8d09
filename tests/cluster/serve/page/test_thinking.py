"""The page in a browser with a model that thinks, and with two models."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from outrider.cluster.serve.metrics import EdgeMetrics
from outrider.cluster.serve.openai.calls import Edge
from outrider.cluster.serve.openai.engine_client import EngineClient
from outrider.cluster.serve.openai.routes import build_http
from outrider.config import EngineConfig
from outrider.engine.frontend import Frontend

from ....helpers.browser import Site, open_browser, serving, until
from ....helpers.frontend import EOS, FakeEngine

pytestmark = [pytest.mark.browser, pytest.mark.slow]

THOUGHT = "the cat <b>sat</b>"
ANSWER = "on the mat."


@pytest.fixture(scope="module")
def open_site(
    tokenizer: Any, config: EngineConfig, limits: Any
) -> Iterator[Callable[..., tuple[Site, list[FakeEngine]]]]:
    """A page of servers that write these texts, each under a name."""
    with ExitStack() as stack:
        browser = stack.enter_context(open_browser())

        def open_site(**texts: str) -> tuple[Site, list[FakeEngine]]:
            engines, edges = [], []
            for name, text in texts.items():
                engines.append(FakeEngine(limits, [*tokenizer.encode(text), EOS]))
                stack.callback(engines[-1].shutdown)
                settings = {"served_model_name": name, "reasoning_parser": "qwen3"}
                served = EngineConfig.load({**config.model_dump(exclude_unset=True), **settings})
                client = EngineClient(engines[-1])
                edges.append(Edge(client, Frontend(served, limits), EdgeMetrics(name)))
            url = stack.enter_context(serving(build_http(*edges)))
            site = Site(engines[0], browser, url, set(), [])
            site.reset()
            return site, engines

        yield open_site


def chat(site: Site) -> None:
    site.choose("#kind", "chat")


def test_reasoning_is_streamed_dimmed_and_folds(open_site: Any) -> None:
    from selenium.webdriver import Keys

    site, (engine,) = open_site(tiny=f"<think>{THOUGHT}</think>\n\n{ANSWER}")
    chat(site)
    engine.pause_s = 0.3
    site.one("#max_tokens").clear()
    site.one("#max_tokens").send_keys("100")
    site.one("#run").click()
    # While it thinks: its tokens are there, and nothing else.
    until(lambda: "Thinking" in (site.all("#output summary") or [site.one("h1")])[0].text)
    assert site.all("#output > .token") == []
    engine.pause_s = 0.0
    until(lambda: site.one("#run").is_enabled())
    assert site.text("#output .thoughts") == f"<think>{THOUGHT}</think>\n\n"
    rest = "".join(each.get_attribute("textContent") for each in site.all("#output > .token"))
    assert rest == ANSWER
    num_thoughts = len(site.all("#output .thoughts .token"))
    assert site.text("#output summary") == f"Reasoning: {num_thoughts} tokens"
    colour = "return getComputedStyle(arguments[0]).color"
    thought, own = site.one(".thoughts .token"), site.one("#output > .token")
    assert site.script(colour, thought) != site.script(colour, own)
    # Folded by keyboard; the arrow keys then pass over what cannot be seen.
    site.script("arguments[0].focus()", site.one("#output summary"))
    site.browser.switch_to.active_element.send_keys(Keys.ENTER)
    until(lambda: not thought.is_displayed())
    until(lambda: own.get_attribute("tabindex") == "0")
    site.script("arguments[0].focus()", own)
    site.browser.switch_to.active_element.send_keys(Keys.ARROW_RIGHT)
    assert site.script("return document.activeElement") == site.all("#output > .token")[1]
    site.run("#compare", max_tokens=100)
    assert not site.one(".thoughts .token").is_displayed(), "it stays folded"
    assert site.text("#output .thoughts") == f"<think>{THOUGHT}</think>\n\n"
    assert "same text" in site.text("#figures")
    assert site.errors() == []


def test_one_of_two_models_is_chosen(open_site: Any) -> None:
    site, engines = open_site(first="the first one", second="<think>hm</think>the second one")
    assert site.text("#model") == "first, second"
    assert site.one("#choice").is_displayed()
    options = site.one("#model-choice").find_elements("css selector", "option")
    assert [each.text for each in options] == ["first", "second"]
    site.run()
    assert [len(each.submitted) for each in engines] == [1, 0]
    assert site.text("#output").startswith("the first one")
    options[1].click()
    chat(site)
    site.run()
    assert [len(each.submitted) for each in engines] == [1, 1]
    assert site.text("#output .thoughts") == "<think>hm</think>"
    assert site.text("#output").endswith("the second one")
    assert not site.one("#problem").is_displayed()
