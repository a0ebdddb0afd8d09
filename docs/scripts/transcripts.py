"""What the official clients send to a server and print, `docs/transcripts.md`; a slow test runs the
page's code again and compares the shapes of what is sent and printed.

`python -m outrider.docs.scripts.transcripts http://localhost:8000` writes it, from a server that
was started as the page says.
"""

from __future__ import annotations

import io
import json
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

PAGE = Path(__file__).resolve().parents[1] / "transcripts.md"
SETTINGS = """\
model: demo/models/target
served_model_name: demo
reasoning_parser: mistral
tool_call_parser: hermes
chat_template: |
  {%- for message in messages -%}
  {{- "# " ~ message.role ~ ": " ~ (message.content or "") | trim | replace("\\n", "\\n# ") -}}
  {%- for call in message.tool_calls or [] -%}
  {{- call.function.name ~ "(" ~ call.function.arguments | tojson ~ ")" -}}
  {%- endfor -%}
  {{- "\\n" -}}
  {%- endfor -%}
  {%- if add_generation_prompt -%}
  {{- "# assistant:\\nclass Answer:\\n    " ~ ("[THINK]\\n" if enable_thinking else "") -}}
  {%- endif -%}
speculative_config:
  decoding_type: Eagle3
  speculative_model: demo/models/eagle3
"""
_HEAD = """# Transcripts of the official clients

What OpenAI's and Anthropic's clients, at the [tested versions](clients.md), send to a server and
what they get. `python -m outrider.docs.scripts.transcripts http://localhost:8000` has run the code
of this page and written the page; the slow tests run the code again and compare events, their order
and their fields.

The server is `outrider serve --config transcripts.yaml`, with the [demo target](../demo/README.md)
and a head that drafts for it:

```yaml
{settings}```

The target continues Python code and follows no instructions: calls and objects are made of its
text by [grammars](tools.md#what-is-enforced) alone. It has not learnt to think either; the template
begins a class, and a block of thinking where a request asks for one.

After each block of code follow its request (method, path and body), an empty line, and what the
code prints. JSON is broken into lines. Ids end in 0, times are 0, and of many lines of one shape
the first two and the last are shown. All is greedy (`temperature` 0); another processor may give
other tokens, and other drafts cut a stream elsewhere.
"""


@dataclass(frozen=True, slots=True)
class Section:
    """A heading, what is to be seen there, and code: one request a step."""

    title: str
    text: str
    steps: tuple[str, ...]


_OPENAI = (
    Section(
        "Chat, streamed",
        "Each step of the engine gives an event with all tokens that it accepted. The last one has "
        "the usage, with [how speculation went](http.md#usage).",
        (
            """\
stream = client.chat.completions.create(
    model="demo",
    messages=[{"role": "user", "content": "Write a function that adds two numbers."}],
    temperature=0,
    max_tokens=32,
    stream=True,
    stream_options={"include_usage": True},
)
for chunk in stream:
    print(chunk.to_json(indent=None))
""",
        ),
    ),
    Section(
        "Tools",
        "A call is [enforced](tools.md#what-is-enforced) by `tool_choice`; its arguments arrive as "
        "they are generated. The call and its result are a part of the next request.",
        (
            """\
weather = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Rome"]}},
    "required": ["city"],
}
messages = [{"role": "user", "content": "How is the weather in Oslo?"}]
tools = [{"type": "function", "function": {"name": "get_weather", "parameters": weather}}]
with client.chat.completions.stream(
    model="demo",
    messages=messages,
    tools=tools,
    tool_choice="required",
    parallel_tool_calls=False,
    temperature=0,
    max_tokens=200,
) as stream:
    for event in stream:
        if event.type == "chunk":
            print(event.chunk.to_json(indent=None))
    answer = stream.get_final_completion().choices[0].message
""",
            """\
call = answer.tool_calls[0]
messages += [answer, {"role": "tool", "tool_call_id": call.id, "content": "sunny, 21 degrees"}]
completion = client.chat.completions.create(
    model="demo", messages=messages, temperature=0, max_tokens=12
)
print(completion.to_json(indent=None))
""",
        ),
    ),
    Section(
        "Structured output",
        "The client makes a [schema](http.md#structured-output) of the class, and an object of the "
        "answer.",
        (
            """\
import enum
import pydantic


class Colour(enum.Enum):
    red = "red"
    green = "green"


class Fruit(pydantic.BaseModel):
    colour: Colour
    ripe: bool


completion = client.chat.completions.parse(
    model="demo",
    messages=[
        {"role": "user", "content": "Describe a lime."},
        {"role": "assistant", "content": '{"colour": "green", "ripe": true}'},
        {"role": "user", "content": "Describe a cherry."},
    ],
    response_format=Fruit,
    temperature=0,
    max_tokens=200,
)
message = completion.choices[0].message
print(json.dumps({"content": message.content, "parsed": message.parsed.model_dump(mode="json")}))
""",
        ),
    ),
    Section(
        "Responses",
        "[`/v1/responses`](http.md#responses) with its events. `max_output_tokens` ends this text.",
        (
            """\
stream = client.responses.create(
    model="demo",
    instructions="Answer in Python.",
    input="Close the connection.",
    temperature=0,
    max_output_tokens=24,
    stream=True,
)
for event in stream:
    print(event.to_json(indent=None))
""",
            """\
response = client.responses.create(
    model="demo",
    input="How is the weather in Rome?",
    tools=[{"type": "function", "name": "get_weather", "parameters": weather}],
    tool_choice="required",
    parallel_tool_calls=False,
    temperature=0,
    max_output_tokens=200,
)
print(json.dumps([item.to_dict() for item in response.output]))
""",
        ),
    ),
    Section(
        "Errors of OpenAI's API",
        "A fault is an exception of the client's, whose body names the field. The target's "
        "checkpoint is not [made for embeddings](models.md#embeddings-and-scores).",
        (
            """\
try:
    client.embeddings.create(model="demo", input="the cat")
except openai.APIStatusError as error:
    print(f"{type(error).__name__}: {error.status_code}")
    print(error.response.text)
""",
            """\
try:
    client.chat.completions.create(
        model="demo", messages=[{"role": "user", "content": "Hello"}], temperature=-1
    )
except openai.APIStatusError as error:
    print(f"{type(error).__name__}: {error.status_code}")
    print(error.response.text)
""",
            """\
try:
    client.completions.create(model="another", prompt="def")
except openai.APIStatusError as error:
    print(f"{type(error).__name__}: {error.status_code}")
    print(error.response.text)
""",
        ),
    ),
)
_ANTHROPIC = (
    Section(
        "Messages: thinking and a call, streamed",
        "The server [closes the thinking](http.md#thinking-of-a-bounded-length) after its budget. "
        "All blocks are a part of the next request, as they are. This version of the client has no "
        "`temperature` of its own; `extra_body` sends it.",
        (
            """\
weather = {
    "name": "get_weather",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"enum": ["Oslo", "Rome"]}},
        "required": ["city"],
    },
}
messages = [{"role": "user", "content": "How is the weather in Oslo?"}]
with client.messages.stream(
    model="demo",
    messages=messages,
    tools=[weather],
    tool_choice={"type": "any", "disable_parallel_tool_use": True},
    thinking={"type": "enabled", "budget_tokens": 24},
    max_tokens=200,
    extra_body={"temperature": 0},
) as stream:
    for event in stream:
        if event.type not in ("thinking", "signature", "input_json"):  # the client's own
            print(event.to_json(indent=None))
    answer = stream.get_final_message()
""",
            """\
call = answer.content[-1]
result = {"type": "tool_result", "tool_use_id": call.id, "content": "sunny, 21 degrees"}
messages += [
    {"role": "assistant", "content": answer.content},
    {"role": "user", "content": [result]},
]
message = client.messages.create(
    model="demo",
    messages=messages,
    tools=[weather],
    max_tokens=12,
    extra_body={"temperature": 0},
)
print(message.to_json(indent=None))
""",
        ),
    ),
    Section(
        "Counting tokens",
        "Of the same conversation, without computing it.",
        (
            """\
count = client.messages.count_tokens(model="demo", messages=messages, tools=[weather])
print(count.to_json(indent=None))
""",
        ),
    ),
    Section(
        "Errors of Anthropic's API",
        "They have Anthropic's form, with the field at fault in `param`.",
        (
            """\
try:
    client.messages.create(
        model="demo",
        max_tokens=16,
        thinking={"type": "enabled", "budget_tokens": 16},
        messages=[{"role": "user", "content": "Hello"}],
    )
except anthropic.APIStatusError as error:
    print(f"{type(error).__name__}: {error.status_code}")
    print(error.response.text)
""",
            """\
try:
    client.messages.create(
        model="another", max_tokens=16, messages=[{"role": "user", "content": "Hello"}]
    )
except anthropic.APIStatusError as error:
    print(f"{type(error).__name__}: {error.status_code}")
    print(error.response.text)
""",
        ),
    ),
)
_CLIENTS = {
    "OpenAI's client": (
        'import json\nimport openai\n\nclient = openai.OpenAI(base_url="{url}/v1", api_key="none")',
        _OPENAI,
    ),
    "Anthropic's client": (
        'import anthropic\n\nclient = anthropic.Anthropic(base_url="{url}", api_key="none")',
        _ANTHROPIC,
    ),
}
_ID = re.compile(r"\b([a-z]+[-_])[0-9a-f]{8,}(?:-[0-9a-f]+)*(?![0-9a-z])")
_TIMES = ("created", "created_at", "completed_at")
_KINDS = ("type", "object", "role", "status", "finish_reason", "stop_reason", "code", "param")
_SHOWN_OF_A_SHAPE = 3
_COLUMNS = 100


def render(url: str) -> str:
    """The page, by the server at `url`."""
    lines = [_HEAD.replace("{settings}", SETTINGS)]
    for client, (begin, sections) in _CLIENTS.items():
        shown = begin.replace("{url}", "http://localhost:8000")
        lines += [f"## {client}", "", "```python notest", shown, "```", ""]
        names, sent = _connected(begin.replace("{url}", url))
        for section in sections:
            lines += [f"### {section.title}", "", section.text, ""]
            for code in section.steps:
                lines += ["```python notest", code.rstrip("\n"), "```", ""]
                lines += ["```text", *_transcript(code, names, sent), "```", ""]
    return "\n".join(lines).rstrip("\n") + "\n"


def _connected(begin: str) -> tuple[dict[str, Any], list[Any]]:
    """The names that `begin` makes, and the requests that its client sends from now on."""
    names: dict[str, Any] = {"__name__": "transcript"}
    sent: list[Any] = []
    exec(compile(begin, "begin", "exec", dont_inherit=True), names)
    module = names.get("openai") or names["anthropic"]
    hooks = {"request": [sent.append]}
    names["client"] = names["client"].with_options(
        http_client=module.DefaultHttpxClient(event_hooks=hooks), max_retries=0
    )
    return names, sent


def _transcript(code: str, names: dict[str, Any], sent: list[Any]) -> Iterator[str]:
    """The lines of a step: its request, an empty line, and what the code prints, trimmed."""
    sent.clear()
    printed = io.StringIO()
    with redirect_stdout(printed):
        exec(compile(code, "step", "exec", dont_inherit=True), names)
    (request,) = sent
    yield f"{request.method} {request.url.path}"
    yield from _broken(_placed(json.loads(request.content)))
    yield ""
    for _, run in groupby(map(_read, printed.getvalue().splitlines()), shape):
        alike = [_placed(value) for value in run]
        left = len(alike) - _SHOWN_OF_A_SHAPE
        for number, value in enumerate(alike):
            if left <= 1 or number < _SHOWN_OF_A_SHAPE - 1 or number == len(alike) - 1:
                yield from _broken(value) if not isinstance(value, str) else [value]
            elif number == _SHOWN_OF_A_SHAPE - 1:
                yield f"... {left} more"


def _read(line: str) -> Any:
    """A printed line: JSON, or text."""
    return json.loads(line) if line.startswith(("{", "[")) else line


def _placed(value: Any) -> Any:
    """The value with placeholders for what is drawn anew each time."""
    if isinstance(value, dict):
        return {key: 0 if key in _TIMES and each else _placed(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_placed(each) for each in value]
    return _ID.sub(r"\g<1>0", value) if isinstance(value, str) else value


def shape(value: Any, key: str = "") -> str:
    """What any processor prints: keys and kinds; texts and numbers are left out."""
    if isinstance(value, dict):
        return f"{{{', '.join(f'{name}: {shape(each, name)}' for name, each in value.items())}}}"
    if isinstance(value, list):
        return f"[{', '.join(dict.fromkeys(map(shape, value)))}]"
    if isinstance(value, str):
        return value if key in _KINDS else "text"
    return str(value) if value is None or isinstance(value, bool) else "number"


def shapes(page: str) -> list[str]:
    """The page's lines with values replaced by shapes, each run of one shape once."""
    found: list[str] = []
    decoder = json.JSONDecoder()
    for part in re.split(r"(^```text\n.*?^```)", page, flags=re.MULTILINE | re.DOTALL):
        if not part.startswith("```text"):
            found += part.splitlines()
            continue
        at = 0
        while at < len(part):
            if part[at] in "{[":
                value, at = decoder.raw_decode(part, at)
                line = shape(value)
            else:
                line, _, _ = part[at:].partition("\n")
                at += len(line)
            at += 1
            if not line.startswith("... ") and (not found or found[-1] != line):
                found.append(line)
    return found


def _broken(value: Any, before: str = "", after: str = "") -> Iterator[str]:
    """JSON on one line where it fits, otherwise as many items a line as fit, wide ones broken."""
    line = f"{before}{json.dumps(value, ensure_ascii=False)}{after}"
    if len(line) <= _COLUMNS or not value or not isinstance(value, (dict, list)):
        yield line
        return
    indent = " " * (len(before) - len(before.lstrip(" ")) + 2)
    begin, end = "{}" if isinstance(value, dict) else "[]"
    items: list[tuple[str, Any]] = (
        [(f"{json.dumps(name)}: ", each) for name, each in value.items()]
        if isinstance(value, dict)
        else [("", each) for each in value]
    )
    yield f"{before}{begin}"
    filled = ""
    for number, (name, each) in enumerate(items):
        comma = "," if number < len(items) - 1 else ""
        first, *others = _broken(each, f"{indent}{name}", comma)
        joined = f"{filled} {first.lstrip(' ')}" if filled else first
        if filled and (others or len(joined) > _COLUMNS):
            yield filled
            joined = first
        if others:
            yield from (joined, *others)
        filled = "" if others else joined
    if filled:
        yield filled
    yield f"{indent[2:]}{end}{after}"


def main(arguments: list[str], write: Callable[[str], object]) -> None:
    """Writes the page by the server that the command names."""
    (url,) = arguments
    write(render(url.rstrip("/")))


if __name__ == "__main__":
    main(sys.argv[1:], lambda page: PAGE.write_text(page, encoding="utf-8"))
