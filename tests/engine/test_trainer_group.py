"""Weights that a trainer sends to the ranks over a process group, without files."""

from __future__ import annotations

import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from outrider import LLM
from outrider.errors import CheckpointError, ConfigError, InvalidRequestError, WorkerError
from outrider.workers.collective import TrainerGroup

from ..helpers.engines import complete, plain_outputs, random_prompts
from ..helpers.models import with_scales

PROMPTS = random_prompts(6, 96)


def wanted(model: str) -> Any:
    return plain_outputs(model, PROMPTS, {})[0]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Trainer:
    """The trainer's end, in a thread beside the calls of the engine."""

    def __init__(self, llm: LLM, ranks: int, name: str = "weights") -> None:
        self.llm, self.name, port = llm, name, free_port()
        made: list[TrainerGroup] = []
        options = {"name": name, "timeout_s": 120.0}
        thread = threading.Thread(
            target=lambda: made.append(TrainerGroup("127.0.0.1", port, 1 + ranks, **options))
        )
        thread.start()
        llm.init_weights_update_group("127.0.0.1", port, 1, 1 + ranks, name, timeout_s=120.0)
        thread.join()
        (self.group,) = made

    def update(self, folder: str, **changes: Any) -> int:
        state = state_of(folder)
        names = list(state)
        given = {
            "names": names,
            "dtypes": [state[name].dtype for name in names],
            "shapes": [state[name].shape for name in names],
            **changes,
        }
        sending = threading.Thread(target=self.group.send, args=(state,))
        if not changes:
            sending.start()
        try:
            return self.llm.update_weights_from_distributed(**given, group_name=self.name)
        finally:
            if not changes:
                sending.join()


def state_of(folder: str) -> dict[str, Any]:
    return load_file(Path(folder, "model.safetensors"))


def llm_of(model: str, **options: Any) -> LLM:
    options = {"executor": "local", "dtype": "float32", "num_kv_blocks": 256, **options}
    return LLM(model, **options)


@pytest.fixture(scope="module")
def tiny_with_tokenizer(tiny, tokenizer_path):
    """LLMs need a tokenizer; its ids beyond the model's are never asked for."""
    import shutil

    for folder in (tiny.target, tiny.draft):
        for file in tokenizer_path.glob("token*"):
            shutil.copy(file, folder)
    return tiny


@pytest.mark.parametrize("size", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", ["none", "ngram", "colocated", "separate"])
def test_outputs_are_those_of_a_new_engine(tiny_with_tokenizer, kind, size):
    tiny = tiny_with_tokenizer
    section: dict[str, Any] | None = {
        "none": None,
        "ngram": {"decoding_type": "NGram", "max_draft_len": 4},
    }.get(kind, {"decoding_type": "DraftTarget", "speculative_model": tiny.draft})
    if kind in ("colocated", "separate"):
        section = {**(section or {}), "placement": kind}
    with llm_of(tiny.target, speculative_config=section, tensor_parallel_size=size) as llm:
        trainer = Trainer(llm, size)
        for count, model in enumerate((tiny.draft, tiny.target, tiny.draft), 1):
            assert trainer.update(model) == count
            assert complete(llm.engine, PROMPTS)[0] == wanted(model)
            assert llm.stats()["weights"]["sent"] == "served"
        assert llm.stats()["num_restarts"] == 0
        assert llm.update_weights(tiny.target) == 4  # of a folder again
        assert complete(llm.engine, PROMPTS)[0] == wanted(tiny.target)
        assert "sent" not in llm.stats()["weights"]
        llm.destroy_weights_update_group()
        with pytest.raises(ConfigError, match="no group"):
            llm.destroy_weights_update_group()


def test_what_does_not_fit_is_refused_before_anything_is_sent(tiny_with_tokenizer):
    tiny = tiny_with_tokenizer
    with llm_of(tiny.target) as llm:
        with pytest.raises(ConfigError, match="no group 'weights' was joined"):
            llm.update_weights_from_distributed([], [], [])
        trainer = Trainer(llm, 1)
        state = state_of(tiny.draft)
        names = list(state)
        dtypes, shapes = [state[n].dtype for n in names], [tuple(state[n].shape) for n in names]
        for changes, message in (
            ({"names": [*names[1:], "nothing"]}, "nothing"),
            ({"names": names[1:], "dtypes": dtypes[1:], "shapes": shapes[1:]}, names[0]),
            ({"shapes": [(3,), *shapes[1:]]}, names[0]),
            ({"shapes": shapes[1:]}, "names"),
            ({"dtypes": ["decimal", *dtypes[1:]]}, "decimal"),
            ({"names": [names[1], *names[1:]]}, "repeat"),
            ({"shapes": [(-3,), *shapes[1:]]}, "shapes"),
        ):
            with pytest.raises(ConfigError, match=message):
                trainer.update(tiny.draft, **changes)
        assert complete(llm.engine, PROMPTS)[0] == wanted(tiny.target)
        assert trainer.update(tiny.draft) == 1  # the group still serves
        assert complete(llm.engine, PROMPTS)[0] == wanted(tiny.draft)
        for arguments in ((0, 2), (1, 1), (2, 2)):
            with pytest.raises(InvalidRequestError, match="rank_offset"):
                llm.init_weights_update_group("127.0.0.1", 1, *arguments)
        with pytest.raises(InvalidRequestError, match="backend"):
            llm.init_weights_update_group("127.0.0.1", 1, 1, 2, backend="mpi")  # type: ignore[arg-type]


def test_a_trainer_that_does_not_come(tiny_with_tokenizer):
    tiny = tiny_with_tokenizer
    with llm_of(tiny.target) as llm:
        with pytest.raises(ConfigError, match="no process group with the trainer"):
            llm.init_weights_update_group("127.0.0.1", free_port(), 1, 2, timeout_s=1.0)
        with pytest.raises(ConfigError, match="nobody listened at no-such-host.invalid:5"):
            llm.init_weights_update_group("no-such-host.invalid", 5, 1, 2, timeout_s=0.2)
        for host, port, field in (("a" * 70, 5, "master_address"), ("::1", 70_000, "master_port")):
            with pytest.raises(ConfigError, match=field):
                llm.init_weights_update_group(host, port, 1, 2)
        assert complete(llm.engine, PROMPTS)[0] == wanted(tiny.target)


def test_requests_go_on_until_the_trainer_comes(tiny_with_tokenizer):
    tiny, port = tiny_with_tokenizer, free_port()
    with llm_of(tiny.target) as llm, ThreadPoolExecutor(1) as pool:
        joined = pool.submit(
            llm.init_weights_update_group, "127.0.0.1", port, 1, 2, timeout_s=120.0
        )
        assert complete(llm.engine, PROMPTS)[0] == wanted(tiny.target)
        assert not joined.done()
        TrainerGroup("127.0.0.1", port, 2, timeout_s=120.0)
        joined.result(120.0)


def test_a_rank_that_is_replaced_does_not_have_them(tiny_with_tokenizer):
    tiny = tiny_with_tokenizer
    with llm_of(tiny.target) as llm:
        Trainer(llm, 1).update(tiny.draft)
        llm.engine._inbox.put(lambda: llm.engine._recover(WorkerError("lost")))
        llm.engine._change("keep", lambda: None)
        assert llm.is_paused()
        assert llm.stats()["weights"]["sent"] == "lost"
        Trainer(llm, 1, "again").update(tiny.draft)
        assert llm.stats()["weights"]["sent"] == "served"
        llm.resume_generation()
        assert complete(llm.engine, PROMPTS)[0] == wanted(tiny.draft)


def test_sleep(tiny_with_tokenizer):
    """Weights that are in no folder stay in memory at level 1, and may come at either level."""
    tiny = tiny_with_tokenizer
    with llm_of(tiny.target) as llm:
        trainer = Trainer(llm, 1)
        trainer.update(tiny.draft)
        llm.sleep(1)
        llm.wake_up()
        assert complete(llm.engine, PROMPTS)[0] == wanted(tiny.draft)
        llm.sleep(2)
        trainer.update(tiny.draft)
        assert llm.stats()["sleeping"] == ["kv_cache"]
        llm.wake_up()
        assert complete(llm.engine, PROMPTS)[0] == wanted(tiny.draft)
        llm.sleep(2)
        llm.wake_up()  # and no others came
        assert llm.is_paused()
        assert llm.stats()["weights"]["sent"] == "lost"
        llm.resume_generation()
        assert complete(llm.engine, PROMPTS)[0] == wanted(tiny.target)
        assert "sent" not in llm.stats()["weights"]


def test_scales_of_the_cache_stay_unless_others_come(tiny_with_tokenizer, tmp_path):
    """From a trainer, and with a state dict; one that is none is refused, and nothing changes."""
    options = {"kv_cache_dtype": "fp8", "deterministic": True}
    names = ("k_scale", "v_scale")
    folders = [tiny_with_tokenizer.target]
    for index, scales in enumerate(((0.02, 0.5), (0.05, 0.3), (0.0, 1.0))):
        given = dict(zip(names, scales, strict=True))
        folders.append(str(with_scales(folders[0], tmp_path / str(index), **given)))
    none, scaled, others, wrong = folders

    def says(llm: LLM) -> Any:
        return complete(llm.engine, PROMPTS, at_once=1)[0]

    texts = {}
    for folder in (none, scaled, others):
        with llm_of(folder, **options) as llm:
            texts[folder] = says(llm)
    assert len({str(text) for text in texts.values()}) == 3
    with llm_of(scaled, **options) as llm:
        trainer = Trainer(llm, 1)
        for update in (trainer.update, lambda folder: llm.update_weights(state_of(folder))):
            update(none)
            assert says(llm) == texts[scaled]
            update(others)
            assert says(llm) == texts[others]
            with pytest.raises((CheckpointError, ConfigError), match="one number above 0"):
                update(wrong)
            assert says(llm) == texts[others]
            llm.update_weights(scaled)
            assert says(llm) == texts[scaled]
        assert llm.stats()["num_restarts"] == 0
