"""Drafter groups: members that several engines share, which die, join and leave."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import ray

from outrider.cluster.app import build_app
from outrider.cluster.drafters import (
    MemberScaling,
    end_group,
    facts_of,
    find_group,
    group_names,
    scale_group,
    start_group,
)
from outrider.config import EngineConfig, GroupAutoscalingConfig
from outrider.engine.weights import DrafterChange
from outrider.errors import CheckpointError, ConfigError

from ..helpers.engines import complete, engine_of, plain_outputs, random_prompts
from ..helpers.head_files import medusa_tensors, write_medusa
from ..helpers.models import write_models, write_of_another_vocabulary
from ..helpers.ports import wait_for
from ..helpers.serving.kills import is_dead, kill, stop

pytestmark = [pytest.mark.ray, pytest.mark.timeout(900)]
PROMPTS = random_prompts(4, 96)
SAMPLED = {"temperature": 0.9, "top_p": 0.9, "max_tokens": 40}
FEW = {"cpus_per_worker": 0.25}


@pytest.fixture(scope="module")
def plain(tiny):
    return plain_outputs(tiny.target, PROMPTS, SAMPLED)[0]


@contextmanager
def group_of(
    model: str, name: str = "small", num_members: int = 1, **options: Any
) -> Iterator[Any]:
    max_engines = options.pop("max_engines", 2)
    options = {"dtype": "float32", "num_kv_blocks": 512, "resources": FEW, **options}
    config = EngineConfig.load({"model": model, **options})
    group = start_group(name, config, num_members=num_members, max_engines=max_engines)
    try:
        wait_for(lambda: num_up(group) == num_members, 120)
        yield group
    finally:
        end_group(group)
        assert name not in group_names(), "another one may have it at once"


def num_up(group: Any) -> int:
    return sum(not reason for reason in facts_of(group).members.values())


def section(name: str = "small", **keys: Any) -> dict[str, Any]:
    return {"decoding_type": "DraftTarget", "drafter_group": name, "max_draft_len": 3, **keys}


def using(model: str, section: dict[str, Any]) -> Any:
    return engine_of(model, section, executor="ray", resources=FEW)


def counts(engine: Any) -> dict[str, Any]:
    return engine.stats()["drafters"]["draft_target"]


def members(engine: Any) -> dict[str, Any]:
    return engine._drafting.drafter._drafters


CACHE = {"outcomes": 8, "adaptive": False}
MASKS = {"decoding_type": "PARD", "mask_token_id": 95}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "cache", "method"), [(2, None, {}), (2, CACHE, {}), (1, CACHE, MASKS)]
)
def test_two_engines_draft_with_one_group(cluster, tiny, plain, size, cache, method):
    wanted = section(speculation_cache=cache, draft_timeout_s=60.0, **method)
    with (
        group_of(tiny.draft, tensor_parallel_size=size) as group,
        using(tiny.target, wanted) as one,
        using(tiny.target, wanted) as other,
    ):
        outputs: list[Any] = []
        threads = [
            threading.Thread(target=lambda e=e: outputs.append(complete(e, PROMPTS, **SAMPLED)[0]))
            for e in (one, other)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert outputs == [plain, plain]
        for engine in (one, other):
            (found,) = engine.stats()["drafters"].values()
            assert found["num_acc_tokens"] > 0
            assert found["faults"] == 0
            if cache:
                assert found["speculation_cache"]["num_hits"] > 0
        assert num_up(group) == 1


@pytest.mark.slow
def test_engines_of_two_vocabularies_share_a_member(cluster, tokenizer_path, tmp_path):
    """Each lease has a translation of its own."""
    target = write_models(tokenizer_path, tmp_path)["target"]
    draft, _ = write_of_another_vocabulary(target, tmp_path / "other")
    (wanted,) = plain_outputs(target, PROMPTS, SAMPLED)
    (of_draft,) = plain_outputs(draft, PROMPTS, SAMPLED)
    given = section(draft_timeout_s=60.0, use_heterogeneous_vocab=True)
    with (
        group_of(draft) as group,
        using(target, given) as one,
        using(draft, given) as other,  # of the members' own vocabulary
    ):
        assert complete(one, PROMPTS, **SAMPLED)[0] == wanted
        assert complete(other, PROMPTS, **SAMPLED)[0] == of_draft
        assert all(counts(engine)["num_acc_tokens"] > 0 for engine in (one, other))
        assert counts(other)["num_acc_tokens"] > 0.9 * counts(other)["num_gen_tokens"]
        assert num_up(group) == 1
    with (
        group_of(draft),
        pytest.raises(ConfigError, match="use_heterogeneous_vocab: true"),
        using(target, section()),
    ):
        pass


@pytest.mark.slow
def test_members_die_join_and_leave_while_two_engines_draft(cluster, tiny, plain):
    """No error, no other token; requests move to the members that are up, and back."""
    wanted = section(draft_timeout_s=0.2, speculation_cache={"outcomes": 8, "adaptive": False})
    with (
        group_of(tiny.draft, num_members=2) as group,
        using(tiny.target, wanted) as one,
        using(tiny.target, wanted) as other,
    ):
        assert len(members(one)) == 2
        for round_ in range(2):
            victim = members(one)[min(members(one))]._model._group
            process, strike = victim.reports[0].location.process, (kill, stop)[round_]
            times: list[float] = []

            def struck(count, delta, strike=strike, process=process, times=times, at=9 + round_):
                if count == at:
                    strike(process)
                times.append(time.monotonic())

            found: list[Any] = []
            beside = threading.Thread(
                target=lambda found=found: found.append(complete(other, PROMPTS, **SAMPLED)[0])
            )
            beside.start()
            outputs, last = complete(one, PROMPTS, on_delta=struck, **SAMPLED)
            beside.join()
            assert outputs == plain
            assert found == [plain]
            assert {delta.finish_reason for delta in last.values()} == {"length"}
            wait_for(lambda process=process: members_are_up(group, one, 2, process), 240)
        limits = {"min_members": 0, "max_members": 3, "target_ongoing_requests": 1}
        limits["upscale_delay_s"] = 0
        scale_group(group, GroupAutoscalingConfig(**limits, downscale_delay_s=3))
        going = threading.Event()
        load = threading.Thread(target=drafts_until, args=(other, plain, going))
        load.start()  # four requests
        wait_for(lambda: complete(one, PROMPTS[:1]) and len(members(one)) == 3, 240)
        going.set()
        load.join()
        wait_for(lambda: not facts_of(group).members)
        wait_for(lambda: health_of(one)["state"] == health_of(other)["state"] == "idle")
        assert health_of(one)["reason"] == "drafter group 'small': it is scaled to zero"
        wait_for(lambda: complete(one, PROMPTS, **SAMPLED)[0] == plain and members(one))
        before = counts(one)["num_acc_tokens"]
        assert complete(one, PROMPTS, **SAMPLED)[0] == plain
        assert counts(one)["num_acc_tokens"] > before
        end_group(group)
        assert complete(one, PROMPTS, **SAMPLED)[0] == plain
        wait_for(lambda: complete(one, PROMPTS[:1]) and not members(one))
        wait_for(lambda: health_of(one)["reason"] == "drafter group 'small': it has ended")
        assert health_of(one)["state"] == "down"
        assert one.stats()["num_restarts"] == other.stats()["num_restarts"] == 0


def drafts_until(engine: Any, plain: Any, ends: threading.Event) -> None:
    while not ends.is_set():
        assert complete(engine, PROMPTS, **SAMPLED)[0] == plain


def members_are_up(group: Any, engine: Any, count: int, gone: int) -> bool:
    """Whether as many are up, without a process that has died; an engine sees it as it drafts."""
    complete(engine, PROMPTS[:1])
    processes = [
        drafter._model._group.reports[0].location.process for drafter in members(engine).values()
    ]
    return num_up(group) == count == len(processes) and gone not in processes


@pytest.mark.slow
def test_an_actor_that_dies_is_started_again_and_its_members_go_on(cluster, tiny, plain):
    """Engines draft with them meanwhile; one that was being started begins anew."""
    with (
        group_of(tiny.draft) as group,
        using(tiny.target, section(draft_timeout_s=60.0)) as engine,
    ):
        (first,) = processes(engine)
        scale_group(group, 2)
        kill(process_of(group))
        num_accepted = counts(engine)["num_acc_tokens"]
        assert complete(engine, PROMPTS, **SAMPLED)[0] == plain
        assert counts(engine)["num_acc_tokens"] > num_accepted
        assert first in processes(engine)
        wait_for(lambda: first in processes(engine) and facts_of(group).members)
        kill(first)  # of which the actor knows by its note
        wait_for(lambda: members_are_up(group, engine, 2, first), 240)
        placements = ray.util.placement_group_table().values()
        ours = [each for each in placements if each["name"].startswith("outrider-drafters-small/")]
        assert sum(each["state"] == "CREATED" for each in ours) == 2
        assert complete(engine, PROMPTS, **SAMPLED)[0] == plain
        ended = processes(engine)
        end_group(group)
        wait_for(lambda: all(is_dead(each) for each in ended), 60)
        assert engine.stats()["num_restarts"] == 0


def processes(engine: Any) -> set[int]:
    """Of the members that an engine drafts with."""
    return {each._model._group.reports[0].location.process for each in members(engine).values()}


def process_of(group: Any) -> int:
    return ray.get(group.__ray_call__.remote(lambda _: os.getpid()))


@pytest.mark.slow
def test_an_engine_follows_its_group_to_another_actor_and_model(cluster, tiny, plain):
    """The actor dies and its members with it; one of the same name comes, and another name."""
    with group_of(tiny.draft) as group, using(tiny.target, section()) as engine:
        assert complete(engine, PROMPTS, **SAMPLED)[0] == plain
        ray.kill(group)  # none of its code runs
        wait_for(lambda: complete(engine, PROMPTS[:1]) and not members(engine), 60)
        assert complete(engine, PROMPTS, **SAMPLED)[0] == plain
        assert health_of(engine)["state"] == "down"
        with group_of(tiny.other_vocabulary):
            wait_for(lambda: "vocabulary" in health_of(engine)["reason"], 60)
            assert complete(engine, PROMPTS, **SAMPLED)[0] == plain
        with group_of(tiny.target):  # as a draft model it is always right
            wait_for(lambda: complete(engine, PROMPTS[:1]) and members(engine), 60)
            before = counts(engine)
            assert complete(engine, PROMPTS)[0] == complete(engine, PROMPTS)[0]
            after = counts(engine)
            drafted, accepted = (
                after[key] - before[key] for key in ("num_gen_tokens", "num_acc_tokens")
            )
            assert accepted > 0.9 * drafted > 0
            with group_of(tiny.draft, "other"):
                change = DrafterChange(section("other"), "draft_target")
                engine.change_drafters(change)
                assert complete(engine, PROMPTS, **SAMPLED)[0] == plain
                assert engine._drafting.drafter._group == "other"
                with pytest.raises(ConfigError, match="no drafter group 'third'"):
                    engine.change_drafters(DrafterChange(section("third"), "draft_target"))
                assert complete(engine, PROMPTS, **SAMPLED)[0] == plain
        assert engine.stats()["num_restarts"] == 0


def health_of(engine: Any) -> dict[str, Any]:
    return engine._drafting.all_health()["draft_target"]


@pytest.mark.slow
def test_one_request_is_prepared_by_all_members(cluster, tiny, plain):
    wanted = section(speculation_cache={"outcomes": 2, "adaptive": False, "on_miss": "none"})
    shares = []
    for num_members in (1, 3):
        with (
            group_of(tiny.draft, num_members=num_members),
            using(tiny.target, wanted) as engine,
        ):
            assert complete(engine, PROMPTS, at_once=1, **SAMPLED)[0] == plain
            cache = counts(engine)["speculation_cache"]
            shares.append(cache["num_hits"] / cache["num_lookups"])
            assert all(each._step for each in members(engine).values())
    assert shares[1] > shares[0]


@pytest.mark.slow
def test_an_engine_uses_two_groups_of_which_another_shares_one(cluster, tiny, plain):
    """Both draft into one tree; the shared drafter is killed and stopped again and again."""
    shared = section(draft_timeout_s=0.2, speculation_cache=CACHE)
    both = {
        "decoding_type": "Compose",
        "mode": "merge",
        "members": [shared, section("other", drafter_routing="round_robin", draft_timeout_s=0.2)],
    }
    with (
        group_of(tiny.draft) as group,
        group_of(tiny.target, "other", num_members=2) as other,
        using(tiny.target, both) as one,
        using(tiny.target, shared) as two,
    ):
        small, large = (each.drafter for each in one._drafting.drafter.members)
        assert complete(one, PROMPTS, **SAMPLED)[0] == plain
        drafters = one.stats()["drafters"]
        assert sorted(drafters) == ["draft_target", "draft_target-2"]
        assert all(each["num_acc_tokens"] > 0 for each in drafters.values())
        for each in drafters.values():
            assert each["link"]["sent_bytes"]["sum"] > 0 < each["link"]["received_bytes"]["sum"]
            assert sum(each["link"]["sent_bytes"]["counts"]) > 0
        assert sum(drafters["draft_target-2"]["link"]["link_s"]["counts"]) > 0
        assert all(each._step for each in large._drafters.values())
        for round_ in range(6):
            (victim,) = {
                each._model._group.reports[0].location.process for each in small._drafters.values()
            }
            strike = (kill, stop)[round_ % 2]

            def struck(count, delta, strike=strike, victim=victim, at=9 + round_):
                if count == at:
                    strike(victim)

            found: list[Any] = []
            beside = threading.Thread(
                target=lambda found=found: found.append(complete(two, PROMPTS, **SAMPLED)[0])
            )
            beside.start()
            outputs, last = complete(one, PROMPTS, on_delta=struck, **SAMPLED)
            beside.join()
            assert outputs == plain
            assert found == [plain]
            assert {delta.finish_reason for delta in last.values()} == {"length"}

            def is_back(engine: Any = two, victim: int = victim) -> bool:
                complete(one, PROMPTS[:1])
                complete(engine, PROMPTS[:1])
                return num_up(group) == 1 and processes(engine) not in (set(), {victim})

            wait_for(is_back, 240)
            wait_for(lambda: complete(one, PROMPTS[:1]) and small._drafters, 240)
        before = [each["num_acc_tokens"] for each in one.stats()["drafters"].values()]
        kill(min(each._model._group.reports[0].location.process
                 for each in large._drafters.values()))  # fmt: skip
        assert complete(one, PROMPTS, **SAMPLED)[0] == plain
        after = [each["num_acc_tokens"] for each in one.stats()["drafters"].values()]
        assert all(now > then for now, then in zip(after, before, strict=True))
        end_group(other)
        assert complete(one, PROMPTS, **SAMPLED)[0] == plain
        assert one.stats()["num_restarts"] == two.stats()["num_restarts"] == 0


@pytest.mark.slow
def test_what_cannot_be_shared_is_refused_by_name(cluster, tiny, tmp_path):
    with (
        pytest.raises(ConfigError, match="no drafter group 'small' in this cluster; there is none"),
        using(tiny.target, section()),
    ):
        pass
    head = write_medusa(tmp_path / "head", medusa_tensors(tiny.target, 2), "safetensors")
    with group_of(tiny.draft, max_engines=1) as group:
        assert group_names() == ["small"]
        for name, model, message, field in (
            ("small", tiny.draft, "there is a drafter group 'small' already", "name"),
            ("new", "/nowhere", "nowhere", "model"),
            ("new", head, "head", "model"),
        ):
            with pytest.raises(ConfigError, match=message) as caught:
                start_group(name, EngineConfig.load({"model": model}))
            assert caught.value.field == field
        with (
            pytest.raises(CheckpointError, match="no 'pard_token'") as caught,
            using(tiny.target, section(decoding_type="PARD")),
        ):
            pass
        assert caught.value.field == "speculative_config.drafter_group"
        with pytest.raises(
            ConfigError, match="'other' in this cluster; there is 'small'"
        ) as caught:
            find_group("other", "speculative_config.drafter_group")
        assert caught.value.field == "speculative_config.drafter_group"
        with (
            using(tiny.target, section()),
            pytest.raises(ConfigError, match="1 engines share this drafter already"),
            using(tiny.target, section()),
        ):
            pass
        wait_for(lambda: connects(tiny.target))  # the place of an engine that has ended is free
        assert num_up(group) == 1
    with (
        group_of(tiny.other_vocabulary),
        pytest.raises(ConfigError, match="vocabulary") as caught,
        using(tiny.target, section()),
    ):
        pass
    assert caught.value.field == "speculative_config.drafter_group"
    assert group_names() == []


def connects(target: str) -> bool:
    try:
        with using(target, section()):
            return True
    except ConfigError:
        return False


def test_members_follow_the_requests_within_limits():
    """One for every two requests, after the delays; an engine that reports no more has none."""
    now = [100.0]
    limits = {"min_members": 1, "max_members": 3, "target_ongoing_requests": 2}
    limits |= {"upscale_delay_s": 10, "downscale_delay_s": 20}
    scaling = MemberScaling(GroupAutoscalingConfig(**limits), 64, lambda: now[0])

    def wanted(at_s: float, num_members: int, **loads: int) -> int:
        now[0] = 100.0 + at_s
        for engine, count in loads.items():
            scaling.report(engine, count)
        return scaling.wanted(num_members)

    assert wanted(1, 2) == 2, "no engine has reported yet"
    assert wanted(2, 1, a=3, b=0) == 1
    assert wanted(11, 1, a=3) == 1
    assert wanted(12, 1, a=3) == 2
    assert wanted(13, 2, a=9, b=9) == 2
    assert wanted(18, 2, a=4, b=0) == 2, "it was more for five seconds only"
    assert wanted(19, 2, a=9, b=9) == 2
    assert wanted(29, 2, a=9, b=9) == 3, "and no more than three"
    assert wanted(40, 3, b=9) == 3
    assert wanted(43, 3, b=1) == 3, "a still counts"
    assert wanted(44, 3, b=1) == 3
    assert wanted(63, 3, b=1) == 3
    assert wanted(64, 3, b=1) == 1
    assert wanted(200, 1) == 1
    limits["min_members"] = 0
    scaling = MemberScaling(GroupAutoscalingConfig(**limits), 64, lambda: now[0])
    assert wanted(300, 0, a=0) == 0
    assert wanted(301, 0, a=9) == 1, "the first at once"
    assert wanted(302, 1, a=9) == 1, "and the others as ever"
    assert wanted(311, 1, a=9) == 3
    assert wanted(312, 3, a=0) == 3
    assert wanted(332, 3, a=0) == 0
    everyone = MemberScaling(GroupAutoscalingConfig(max_members=9, upscale_delay_s=0), 64)
    everyone.report("a", 65)
    assert everyone.wanted(1) == 2, "a full batch each"


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("pipeline_parallel_size", 2),
        ("enable_lora", True),
        ("quantization", "fp8"),
        ("speculative_config", {"decoding_type": "NGram"}),
    ],
)
def test_what_is_a_targets_is_no_groups(key, value):
    with pytest.raises(ConfigError) as caught:
        start_group("small", EngineConfig.load({"model": "x", key: value}))
    assert caught.value.field == key


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"speculative_model": "x"}, "speculative_model is that of drafter_group 'small'"),
        ({"num_kv_blocks": 8}, "num_kv_blocks is that of drafter_group"),
        ({"placement": "colocated"}, "drafter_group belongs to placement 'separate'"),
        ({"drafter_group": None, "drafter_routing": "prefix"}, "speculative_model"),
        ({"drafter_group": "a b"}, "drafter_group"),
    ],
)
def test_wrong_sections(wrong, message):
    with pytest.raises(ConfigError, match=message):
        EngineConfig.load({"model": "x", "speculative_config": section(**wrong)})


GROUP = {"name": "small", "model": "d"}


@pytest.mark.parametrize(
    ("groups", "field"),
    [
        ([{"name": "small"}], "serve.drafter_groups.0.model"),
        ([{**GROUP, "name": "a b"}], "serve.drafter_groups.0.name"),
        ([GROUP, {**GROUP, "model": "e"}], "serve.drafter_groups.1.name"),
        ([{**GROUP, "dtipe": "float32"}], "serve.drafter_groups.0.dtipe"),
        ([{**GROUP, "quantization": "fp8"}], "serve.drafter_groups.0.quantization"),
        ([{**GROUP, "num_members": 0}], "serve.drafter_groups.0.num_members"),
        ([{**GROUP, "num_members": 2, "autoscaling_config": {"max_members": 3}}],
         "serve.drafter_groups.0.num_members"),
        ([{**GROUP, "autoscaling_config": {"min_members": 2, "max_members": 1}}],
         "serve.drafter_groups.0.autoscaling_config.min_members"),
        ([{**GROUP, "autoscaling_config": {"min_members": -1, "max_members": 1}}],
         "serve.drafter_groups.0.autoscaling_config.min_members"),
        ([{**GROUP, "max_engines": 3, "autoscaling_config": {"min_members": 0, "max_members": 1}}],
         None),
        ([{**GROUP, "autoscaling_config": {"max_members": 2, "max_replicas": 2}}],
         "serve.drafter_groups.0.autoscaling_config.max_replicas"),
        ([{**GROUP, "max_engines": 2}], "serve.drafter_groups.0.max_engines"),
        ([{**GROUP, "name": "other", "max_engines": 2}], None),
        ([{**GROUP, "max_engines": 3, "tensor_parallel_size": 2}], None),
    ],
)  # fmt: skip
def test_groups_of_an_application(groups, field):
    serve = {"num_replicas": 3, "drafter_groups": groups}
    args = {"model": "x", "speculative_config": section(), "serve": serve}
    if field is None:
        build_app(args)
        return
    with pytest.raises(ConfigError) as caught:
        build_app(args)
    assert caught.value.field == field
