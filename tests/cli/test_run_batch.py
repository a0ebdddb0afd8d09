"""`outrider run-batch` on a demo model in this process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import outrider

EXAMPLE = Path(outrider.__file__).parent / "docs" / "examples" / "batch.jsonl"
LOCAL = ("--executor", "local", "--dtype", "float32", "--num-kv-blocks", 256, "--no-progress")
BODY = {"prompt": "def main", "max_tokens": 6, "temperature": 0}


def line(custom_id: Any, url: str = "/v1/completions", **fields: Any) -> dict[str, Any]:
    return {
        "custom_id": custom_id, "method": "POST", "url": url, "body": {**BODY, **fields}
    }  # fmt: skip


def write(path: Path, lines: list[Any]) -> Path:
    path.write_text("".join(json.dumps(each) + "\n" for each in lines))
    return path


def read(path: Path) -> dict[str, dict[str, Any]]:
    lines = [json.loads(each) for each in path.read_text().splitlines()]
    found = {each["custom_id"]: each for each in lines}
    assert len(found) == len(lines)
    return found


def test_every_line_has_its_answer_or_its_error(outrider_cli, model, tmp_path):
    chat = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 3}
    lines = [
        line("a"),
        line("b", prompt=["def", "class"], n=2, ignore_eos=True),
        line("c", max_tokens=-1),
        line("d", url="/v1/images"),
        line("e", stream=True),
        line("f", model="gpt"),
        {**line("g"), "method": "GET"},
        {**line("h"), "bodies": {}},
        {**line("i"), "url": "/v1/chat/completions", "body": chat},
        {"custom_id": "j", "url": "/v1/completions"},
        line("\ud800", url="/v1/\ud800"),
    ]
    output = tmp_path / "out.jsonl"
    path = write(tmp_path / "in.jsonl", lines)
    result = outrider_cli("run-batch", "-i", path, "-o", output, model, *LOCAL)
    assert result.exit_code == 0, result.stderr
    found = read(output)
    assert set(found) == {each["custom_id"] for each in lines}
    for name, count in (("a", 1), ("b", 4)):
        response = found[name]["response"]
        assert (response["status_code"], found[name]["error"]) == (200, None)
        assert response["body"]["object"] == "text_completion"
        assert response["body"]["usage"]["completion_tokens"] == 6 * count
        assert response["request_id"] == response["body"]["id"]
        assert found[name]["id"].startswith("batch_req_")
    for name, status, field in (
        ("c", 400, "max_tokens"), ("d", 404, "url"), ("e", 400, "stream"), ("f", 404, "model"),
        ("g", 400, "method"), ("h", 400, "bodies"), ("j", 400, "body"),
    ):  # fmt: skip
        response = found[name]["response"]
        assert response["status_code"] == status, found[name]
        assert response["body"]["error"]["param"] == field
        assert found[name]["error"]["message"] == response["body"]["error"]["message"]
    if found["i"]["error"] is not None:  # the model may have no chat template
        assert "chat template" in found["i"]["error"]["message"]
    assert "11 requests: 0 answered before" in result.stderr


def test_a_second_run_goes_on(outrider_cli, model, tmp_path):
    output = tmp_path / "out.jsonl"
    first = write(tmp_path / "first.jsonl", [line("a"), line("b")])
    args = ("-o", output, model, *LOCAL)
    assert outrider_cli("run-batch", "-i", first, *args).exit_code == 0
    before = output.read_text()
    output.write_text(before + '{"id": "batch_req_3", "custom_id": "c", "resp')  # it was killed
    both = write(tmp_path / "both.jsonl", [line("c"), line("a"), line("b")])
    result = outrider_cli("run-batch", "-i", both, *args)
    assert result.exit_code == 0, result.stderr
    assert output.read_text().startswith(before)
    assert set(read(output)) == {"a", "b", "c"}
    assert "3 requests: 2 answered before, 1 now, 0 with an error" in result.stderr


def test_the_documented_example_runs(outrider_cli, model, tmp_path):
    output = tmp_path / "out.jsonl"
    result = outrider_cli("run-batch", "-i", EXAMPLE, "-o", output, model, *LOCAL)
    assert result.exit_code == 0, result.stderr
    assert all(each["response"]["body"]["choices"] for each in read(output).values())


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("{", "error: input_file: line 1: it is not JSON"),
        ("[" * 10**5, "error: input_file: line 1: it is not JSON"),
        ("[]", "error: input_file: line 1: it has to be a JSON object"),
        ('\n{"custom_id": 3}', "error: input_file: line 2: custom_id: expected a text, got 3"),
        ('{"custom_id": "a"}\n{"custom_id": "a"}', "line 2: custom_id: a second line has 'a'"),
    ],
)
def test_an_input_that_is_none_is_refused_before_the_model_loads(
    outrider_cli, tmp_path, text, named
):
    path = tmp_path / "in.jsonl"
    path.write_text(text)
    result = outrider_cli("run-batch", "-i", path, "-o", tmp_path / "out", "/nowhere")
    assert result.exit_code == 1
    assert named in result.stderr


def test_a_file_that_is_no_output_is_left_alone(outrider_cli, tmp_path):
    path, output = write(tmp_path / "in.jsonl", [line("a")]), tmp_path / "out.jsonl"
    result = outrider_cli("run-batch", "-i", path, "-o", path, "/nowhere")
    assert "error: output_file: " in result.stderr
    assert "is the input file" in result.stderr
    for text in ("something else\n", "something else"):
        output.write_text(text)
        result = outrider_cli("run-batch", "-i", path, "-o", output, "/nowhere")
        assert "error: output_file: line 1" in result.stderr
        assert output.read_text() == text
    result = outrider_cli("run-batch", "-i", tmp_path / "none", "-o", output, "/nowhere")
    assert "error: input_file: cannot read" in result.stderr
