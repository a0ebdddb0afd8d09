"""The arithmetic and the simulation of many nodes, the measured units, and the page of them."""

from __future__ import annotations

import asyncio
import inspect
import re
from dataclasses import fields, replace

import numpy as np
import pytest

from outrider.bench import scale
from outrider.bench.simulation import REPORTS_PER_S, LoadViews
from outrider.cluster.pools import EXCHANGE_EVERY_S
from outrider.cluster.serve import edge
from outrider.cluster.serve.edge import FromEngine
from outrider.cluster.serve.engines import MAX_COMPARED, EngineLink, Engines
from outrider.config.speculation import NGramConfig
from outrider.drafters.lookup import ngram
from outrider.scheduler.sampling import SamplingParams
from outrider.scheduler.types import Request, ints
from outrider.tests.helpers.files import ROOT
from outrider.workers.transport import framing

PAGE = ROOT / "docs" / "scale.md"
SIZES, CELLS = (1, 16, 64, 250, 1000), (8, 16, 32, 64, 125, 250, 1000)
SIMULATED = (8, 64, 1000)  # all engines are compared, two of them, and two without cells
NOTHING = scale.Units(**{each.name: 0.0 for each in fields(scale.Units)})
FLEET = scale.Fleet(
    nodes=10, seqs=10, used=0.5, step_ms=20.0, tokens_per_step=2.0, prompt_tokens=600,
    output_tokens=320, learnt_tokens=200,
)  # fmt: skip


def printed(capsys: pytest.CaptureFixture[str]) -> list[str]:
    scale.main(["--sizes", *map(str, SIZES), "--cells", *map(str, SIMULATED)])
    return capsys.readouterr().out.split("\n\n")


def numbers(text: str) -> list[float]:
    return [float(each) for each in re.findall(r"\d+(?:\.\d+)?", text.replace(",", ""))]


def test_the_page_has_the_tables_of_the_arithmetic() -> None:
    text = PAGE.read_text(encoding="utf-8")
    for table in scale.arithmetic(scale.recorded(), scale.Fleet(), SIZES, CELLS):
        assert table.strip() in text, "python -m outrider.bench.scale"


def test_figures_of_the_page_s_text_are_the_model_s() -> None:
    """Every sentence with a figure, made again from the units, the fleet and the code."""
    units, usual = scale.recorded(), scale.Fleet()
    whole, cell = usual.nodes, replace(usual, nodes=64)
    full = {name: scale.saturation(units, usual, name) for name in scale.processes(units, usual)}
    first = min(each for each in full.values() if each is not None)
    limiting = {name for name, most in full.items() if most is not None and most < whole}
    assert limiting == {"pool", "controller", "gcs"}
    assert full["pool"] == first
    few, many = inspect.signature(scale.measure_controller).parameters["sizes"].default
    beside = inspect.signature(scale.measure_nodes).parameters["others"].default
    longest = NGramConfig().max_matching_ngram_size
    steps_per_s = 1000 / usual.step_ms
    layers, hidden, width = 126, 16384, 2  # of Llama 3.1 405B, in bfloat16
    row = hidden * width
    assert usual.learnt_tokens == ngram._MAX_STORED // longest
    assert 1 / EXCHANGE_EVERY_S == scale.EXCHANGES_PER_S
    assert 1 / edge._PUBLISH_S == REPORTS_PER_S
    assert usual.used == 0.8
    assert usual.ranks == 8
    assert max(scale.processes(units, cell).values()) < scale.FULL / 2
    text = " ".join(PAGE.read_text(encoding="utf-8").split())
    for sentence in [
        f"from some {round(first, -2)} nodes on",
        f"{whole:,} nodes are {-(-whole // cell.nodes)} cells of {cell.nodes}",
        f"between few and many replicas ({few} and {many}) and nodes (1 and {1 + beside} on",
        f"Steps take {usual.step_ms:g} ms and give a request {usual.tokens_per_step:g} tokens each",
        f"engines run at most {usual.seqs} requests and {usual.used:.0%} of that on average",
        f"prompts have {usual.prompt_tokens:,} tokens and answers {usual.output_tokens}.",
        f"{2 * layers} a step for a 405B Llama",
        f"{row >> 10} KiB of that model in bfloat16",
        f"Steps of 256 tokens so send {256 * row >> 20} MiB between two GPUs, "
        f"{256 * row * usual.ranks >> 20} MiB between two nodes of eight",
        f"at most {REPORTS_PER_S:.0f} times a second each",
        "every engine exchanges with it five times a second",
        f"up to {1e3 / REPORTS_PER_S:.0f} ms ago, and by what it has sent",
        f"{usual.learnt_tokens} tokens a step with the default patterns of up to {longest} tokens",
        "Of up to eight engines it takes the least loaded",
        f"of {whole:,} nodes, an engine has {2 * whole:,} threads, and an ingress and an engine "
        f"{whole:,} descriptors each",
        f"While {whole:,} engines start one after the other, that is {whole:,} times this",
        f"a cell that serves {usual.used:.0%} of its seats",
    ]:
        assert sentence in text, sentence
    assert scale.EXCHANGES_PER_S == 5
    assert MAX_COMPARED == 8
    assert usual.learnt_tokens == 400
    assert steps_per_s * usual.tokens_per_step * usual.running == pytest.approx(5120)


@pytest.mark.slow
def test_the_page_has_the_tables_that_the_command_prints(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The simulation's to its accuracy: another version of numpy may draw other numbers.

    Cells of other sizes than `SIMULATED` take the same paths.
    """
    *exact, _, simulated = printed(capsys)
    text = PAGE.read_text(encoding="utf-8")
    assert all(table.strip() in text for table in exact)
    title, _, *rows = simulated.strip().splitlines()
    shown = text.partition(title)[2].strip().splitlines()[1 : len(CELLS) + 1]
    by_cell = {int(found.split("|")[1].replace(",", "")): found for found in shown}
    assert list(by_cell) == list(CELLS)
    for cell, row in zip(SIMULATED, rows, strict=True):
        found = by_cell[cell]
        assert numbers(found) == pytest.approx(numbers(row), rel=0.1, abs=1.5), found


def test_the_page_names_the_command_and_the_machine() -> None:
    text = PAGE.read_text(encoding="utf-8")
    record = scale.json.loads(scale.RECORD.read_text())
    assert "python -m outrider.bench.scale --measure" in text
    assert record["machine"] in text
    assert record["date"] in text


def test_requests_of_an_engine_follow_from_its_steps() -> None:
    assert FLEET.running == 5
    assert FLEET.duration_s == pytest.approx(320 / 2 * 0.020)
    assert FLEET.requests_per_s == pytest.approx(5 / 3.2)
    usual = scale.Fleet()
    served = usual.requests_per_s * (usual.prompt_tokens + usual.output_tokens)
    assert round(served / usual.windows_per_s) == scale.MEAN_WINDOW_LEN
    assert FLEET.windows_per_s == pytest.approx(5 / 3.2 * (2 + 10))


@pytest.mark.parametrize(
    ("unit", "process", "per_s"),
    [
        ("step_us", "engine", 50),
        ("step_seq_us", "engine", 50 * 5),
        ("delta_us", "engine", 50 * 5),
        ("report_us", "engine", 10 * 2 * 5 / 3.2),
        ("request_engine_us", "engine", 5 / 3.2),
        ("request_ingress_us", "ingress", 5 / 3.2),
        ("event_ingress_us", "ingress", 50 * 5),
        ("pick_link_us", "ingress", 5 / 3.2 * 10),
        ("report_taken_us", "ingress", 10 * 2 * 5 / 3.2),
        ("report_link_us", "ingress", 10 * 2 * 5 / 3.2 * 10),
        ("exchange_us", "pool", 10 * 5),
        ("published_us", "pool", 10 * 5 / 3.2 * 12),
        ("delivered_us", "pool", 10 * 5 / 3.2 * 12 * (200 * 50 / (5 / 3.2 * 920) - 1)),
        ("controller_us", "controller", 20),
        ("gcs_us", "gcs", 10),
        ("raylet_node_us", "raylet", 9),
    ],
)
def test_each_unit_is_counted_as_often_as_it_occurs(unit: str, process: str, per_s: float) -> None:
    cores = scale.processes(replace(NOTHING, **{unit: 1.0}), FLEET)
    assert cores.pop(process) == pytest.approx(per_s / 1e6)
    assert set(cores.values()) == {0.0}


def test_a_process_saturates_where_it_says() -> None:
    units = replace(NOTHING, gcs_us=1000.0, published_us=50.0)
    assert scale.saturation(units, FLEET, "gcs") == 500
    assert scale.saturation(units, FLEET, "engine") is None
    most = scale.saturation(units, FLEET, "pool")
    assert most is not None
    within, beyond = (
        scale.processes(units, replace(FLEET, nodes=nodes))["pool"] for nodes in (most, most + 1)
    )
    assert within <= scale.FULL < beyond


def test_an_engine_learns_of_others_what_its_own_text_leaves() -> None:
    one = scale.traffic(NOTHING, replace(FLEET, nodes=1))
    assert one["engines to the pool"] == pytest.approx(4 * 5 / 3.2 * (600 + 320))
    assert one["the pool to engines"] == 0
    assert replace(FLEET, learnt_tokens=20).foreign_per_s == 0, "its own text is more"
    pair = replace(FLEET, nodes=2)
    assert pair.foreign_per_s == pair.served_per_s, "all of the only other's"
    ample = replace(FLEET, learnt_tokens=10**9)
    few, many = (
        scale.traffic(NOTHING, replace(ample, nodes=nodes))["the pool to engines"]
        for nodes in (11, 101)
    )
    assert many / few == pytest.approx(101 * 100 / (11 * 10))


def test_the_simulated_choice_is_the_served_one() -> None:
    """Of few engines; of many, both choose the better of two."""

    async def main() -> None:
        draw = np.random.default_rng(0)
        request = Request("r", ints(range(4)), SamplingParams(max_tokens=1), seed=1)
        for size in (1, 3, MAX_COMPARED, MAX_COMPARED + 1, 40):
            loads = draw.permutation(size)
            engines, views = Engines(None, "node"), LoadViews(size, size, MAX_COMPARED)
            for index, load in enumerate(loads.tolist()):
                link = engines._links[f"{index}"] = EngineLink(f"{index}", engines._changed)
                link.data_received(framing.frame(FromEngine(load).encoded()))
            ours = {int(engines._best(request).name) for _ in range(600)}
            theirs = {views.choose(loads, "served", draw) for _ in range(600)}
            if size <= MAX_COMPARED:
                assert ours == theirs == {int(loads.argmin())}
            else:
                assert int(loads.argmax()) not in ours | theirs
                assert min(len(ours), len(theirs)) > size // 2

    asyncio.run(main())


def test_late_loads_gather_requests_on_the_least_loaded_of_many() -> None:
    fleet = scale.Fleet(nodes=64)
    spreads = {
        policy: scale.simulate(fleet, 64, policy, 1.0)
        for policy in ("served", "two", "least", "random")
    }
    assert spreads["served"] == spreads["two"]
    assert spreads["two"].deviation < spreads["random"].deviation / 2
    assert spreads["least"].most > 1.3 > spreads["two"].most
    small = scale.simulate(replace(fleet, nodes=8), 8, "served", 1.0)
    assert small.deviation < spreads["random"].deviation
    assert spreads["two"].waiting <= spreads["random"].waiting


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [(["--nodes", "0"], "at least 1"), (["--cells", "2000"], "as many nodes as there are")],
)
def test_bad_options_are_named(
    arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        scale.main(arguments)
    assert complaint in capsys.readouterr().err


def test_what_is_measured_in_this_process() -> None:
    found = {**scale.measure_loop(), **scale.measure_door(), **asyncio.run(scale.measure_links())}
    names = {each.name for each in fields(scale.Units)}
    assert set(found) <= names
    for name in ("step_us", "step_seq_us", "step_bytes", "frame_us", "report_us", "pick_link_us"):
        assert found[name] > 0, name
    assert scale.recorded()  # complete


@pytest.mark.ray
@pytest.mark.slow
def test_what_is_measured_of_ray() -> None:
    assert set(scale.measure_nodes(1.0, 1, settle_s=0.5)) == {
        "gcs_us", "raylet_us", "raylet_node_us"
    }  # fmt: skip
    pool = scale.measure_pool()
    controller = scale.measure_controller(1.0, (1, 2), settle_s=0.5)
    assert min(pool["published_us"], pool["delivered_us"], pool["exchange_us"]) > 0
    assert 50 < controller["listed_bytes"] < 5000
