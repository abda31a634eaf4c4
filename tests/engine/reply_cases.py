"""The requests whose replies must not tell twinpool from a single vLLM server.

`openai-through-pd` table of behaviours: each one that breaks behind a naive prefill/decode proxy has a case.
"""

from typing import Any

from lab.load.text import article
from tests.engine.replies import Case

CAPITAL = "The capital of France is"
"""Greedy continuation: ` Paris`, `.`, two newlines, `The answer is`."""
PARIS_ID = 7042
FULL_STOP_ID = 30
EOS_ID = 2
LETTER = article(2, 260)
"""321 tokens: two full blocks and two chunks."""
NOTE = article(5, 120)
"""A full block and a bit, in one chunk: a CPU engine of vLLM 0.32 dies of a seeded prompt of several chunks."""

WEATHER_TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Tells the weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
PERSON_SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["Ann", "Bob"]}, "age": {"type": "integer", "minimum": 10, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
_USAGE = {"include_usage": True}
_CONTINUOUS = {"include_usage": True, "continuous_usage_stats": True}


def _completion(
    name: str, prompt: Any = CAPITAL, *, checks: tuple[str, ...] = (), warm: bool = False, **body: Any
) -> Case:
    fields = {"model": "smollm2", "prompt": prompt, "max_tokens": 8, "temperature": 0, **body}
    return Case(name, "completions", fields, warm=warm, checks=checks)


def _chat(name: str, said: str, *, checks: tuple[str, ...] = (), warm: bool = False, **body: Any) -> Case:
    messages = [{"role": "user", "content": said}]
    fields = {"model": "smollm2", "messages": messages, "max_tokens": 8, "temperature": 0, **body}
    return Case(name, "chat", fields, warm=warm, checks=checks)


def _response(name: str, said: str, **body: Any) -> Case:
    fields = {"model": "smollm2", "input": said, "max_output_tokens": 12, "temperature": 0, "store": False, **body}
    return Case(name, "responses", fields)


def _both_ways(case: Case, **streamed: Any) -> list[Case]:
    """The case as it is, and streamed."""
    body = {**case.body, "stream": True, **streamed}
    return [case, Case(f"{case.name}-streamed", case.route, body, case.warm, case.logprob_tolerance, case.checks)]


LENGTHS = [
    *_both_ways(_completion("plain", checks=("Paris",))),
    *_both_ways(_completion("two-chunks-of-prompt", LETTER)),
    *_both_ways(_completion("one-token", max_tokens=1, checks=("Paris",))),
    _completion("two-tokens", max_tokens=2),
    _completion("max-tokens-absent", "One, two, three,", max_tokens=None, stop="nine"),
    _chat("max-completion-tokens", "What is two plus two?", max_tokens=None, max_completion_tokens=5),
    _completion("answer-cut-at-the-context-limit", article(9, 1700), truncate_prompt_tokens=2043, max_tokens=100),
    _completion("min-tokens", min_tokens=6, stop_token_ids=[FULL_STOP_ID]),
    _completion("min-tokens-forbids-a-first-eos", min_tokens=3, logit_bias={str(EOS_ID): 100}),
    _completion("ignore-eos", logit_bias={str(EOS_ID): 100}, ignore_eos=True, max_tokens=4),
    *_both_ways(_completion("first-token-is-eos", logit_bias={str(EOS_ID): 100}, checks=('"stop"',))),
    _chat("eos-ends-a-chat", "Say only the word yes.", max_tokens=40),
]

STOPS = [
    *_both_ways(_completion("stop-string-is-the-first-token", stop=[" Paris"], checks=('"stop"',))),
    *_both_ways(_completion("stop-string-spans-tokens-1-and-2", stop=["is."], checks=('"stop"', " Par"))),
    *_both_ways(_completion("stop-string-later", stop=["answer"], checks=('"stop"',))),
    _completion("stop-string-included", stop=["is."], include_stop_str_in_output=True, checks=('"stop"',)),
    _completion("stop-string-never-comes", stop=["zebra"]),
    *_both_ways(_completion("stop-id-is-the-first-token", stop_token_ids=[PARIS_ID], checks=('"stop"',))),
    _completion("stop-id-is-the-second-token", stop_token_ids=[FULL_STOP_ID], checks=('"stop"',)),
]

LOGPROBS = [
    *_both_ways(_completion("logprobs", logprobs=3, return_token_ids=True)),
    *_both_ways(_completion("logprobs-0-after-two-chunks", LETTER, logprobs=0)),
    *_both_ways(_chat("chat-logprobs", "What is two plus two?", logprobs=True, top_logprobs=3)),
    _completion("logprobs-of-one-token", max_tokens=1, logprobs=2),
    _completion("logprobs-with-a-first-token-stop", stop=[" Paris"], logprobs=2),
    _completion("prompt-logprobs", LETTER, prompt_logprobs=1),
    _completion("prompt-logprobs-with-a-warm-prefix", LETTER, prompt_logprobs=0, warm=True),
    _chat("chat-prompt-logprobs", "What is two plus two?", prompt_logprobs=1),
    *_both_ways(_completion("echo", echo=True, logprobs=1)),
    _completion("echo-without-logprobs", echo=True),
    _completion("echo-scores-the-prompt-only", echo=True, logprobs=1, max_tokens=0),
    _completion("prompt-logprobs-of-one-token", max_tokens=1, prompt_logprobs=1),
]

SAMPLING = [
    _completion("n-3", n=3, temperature=0.9, seed=11),
    # Without a seed: the yardstick may cut the second choice's prompt where the first one's has left it too few tokens.
    _completion("n-3-of-two-blocks", NOTE, n=3, temperature=0.9, logit_bias={str(PARIS_ID): 100}),
    _completion("n-3-streamed", n=3, temperature=0.9, seed=11, stream=True, stream_options=_USAGE),
    _chat("chat-n-3-one-token-each", "Name a colour.", n=3, temperature=1.0, seed=5, max_tokens=1),
    _completion("seed", temperature=0.9, seed=7, max_tokens=12),
    _completion("seed-top-p-top-k", NOTE, temperature=1.2, seed=8, top_p=0.9, top_k=20, max_tokens=12),
    _completion("presence-penalty", "one two one two one two one", presence_penalty=2.0),
    # Four tokens to choose from: the order in which they come depends on token 1 being counted as output.
    _completion("frequency-penalty", frequency_penalty=1.5, allowed_token_ids=[PARIS_ID, FULL_STOP_ID, 260, 28]),
    _completion("repetition-penalty", LETTER, repetition_penalty=1.5),
    _completion("logit-bias", logit_bias={str(PARIS_ID): -100}),
    _completion("bad-words", bad_words=["Paris"]),
    _completion("allowed-token-ids", allowed_token_ids=[PARIS_ID, FULL_STOP_ID]),
]

GRAMMARS = [
    *_both_ways(
        _chat(
            "json-schema",
            "Describe a person as JSON.",
            response_format={"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON_SCHEMA}},
            max_tokens=40,
            checks=("age",),
        )
    ),
    _completion("structured-choice", structured_outputs={"choice": ["Rome", "Lyon"]}),
    _completion("structured-regex", structured_outputs={"regex": r" [A-Z]{3}[0-9]{3}"}),
    *_both_ways(
        _chat(
            "tool-choice-required",
            "Weather in Rome?",
            tools=[WEATHER_TOOL],
            tool_choice="required",
            max_tokens=40,
            checks=("get_weather",),
        )
    ),
    *_both_ways(
        _chat(
            "tool-choice-named",
            "Weather in Rome?",
            tools=[WEATHER_TOOL],
            tool_choice={"type": "function", "function": {"name": "get_weather"}},
            max_tokens=40,
            checks=("get_weather",),
        )
    ),
    _chat("tool-choice-auto", "Weather in Rome?", tools=[WEATHER_TOOL], tool_choice="auto"),
    _chat("tool-choice-none", "Weather in Rome?", tools=[WEATHER_TOOL], tool_choice="none"),
]

PROMPTS = [
    *_both_ways(_completion("batch-of-prompts", [CAPITAL, "One, two, three,", LETTER], max_tokens=4)),
    _completion("batch-of-prompts-times-n", [CAPITAL, "One, two,"], n=2, temperature=0.8, seed=4, max_tokens=4),
    _completion("token-id-prompt", [504, 3575, 282, 4649, 314]),
    _completion("batch-of-token-id-prompts", [[504, 3575, 282], [504, 3575, 282, 4649, 314]], max_tokens=4),
    _completion("truncated-prompt", LETTER, truncate_prompt_tokens=140),
    _completion("multi-byte-characters", "Emoji: 🙂🙃🙂🙃🙂🙃 Umlaute: äöüß äöüß", max_tokens=16),
    _chat("user-and-metadata-fields", "Hello!", user="someone", metadata={"team": "blue"}),
    _chat("priority", "Hello!", priority=0),
]

USAGE = [
    _completion("usage-of-a-cold-prompt", LETTER, checks=('"cached_tokens": 0',)),
    _completion("usage-of-a-warm-prompt", LETTER, warm=True, checks=('"cached_tokens": 256',)),
    _completion("streamed-usage", LETTER, stream=True, stream_options=_USAGE, warm=True),
    _completion("continuous-usage", stream=True, stream_options=_CONTINUOUS),
    _chat("chat-streamed-usage", "What is two plus two?", stream=True, stream_options=_USAGE),
    _chat("chat-continuous-usage", "What is two plus two?", stream=True, stream_options=_CONTINUOUS),
    _completion("usage-of-one-streamed-token", max_tokens=1, stream=True, stream_options=_USAGE),
]

RESPONSES = [
    *_both_ways(_response("responses", "What is the capital of Italy?")),
    _response("responses-with-instructions", "What is the capital of Italy?", instructions="Answer in one word."),
    _response("responses-cut-short", LETTER, max_output_tokens=3),
]

REPLY_CASES: list[Case] = [*LENGTHS, *STOPS, *LOGPROBS, *SAMPLING, *GRAMMARS, *PROMPTS, *USAGE, *RESPONSES]

REFUSALS: list[Case] = [
    _completion("over-long-prompt", [504] * 2100),
    _chat("over-long-chat", "word " * 2100),
    _completion("over-long-prompt-streamed", [504] * 2100, stream=True),
    _completion("prompt-logprobs-streamed", prompt_logprobs=1, stream=True),
    _completion("unknown-model", model="no-such-model"),
    _chat("unknown-chat-model", "Hello!", model="no-such-model"),
    _completion("temperature-out-of-range", temperature=-1),
    _completion("max-tokens-negative", max_tokens=-3),
    _completion("n-0", n=0),
    _completion("greedy-with-n-2", n=2),
    _completion("top-p-of-the-wrong-type", top_p="high"),
    _completion("too-many-logprobs", logprobs=1000),
    _completion("min-tokens-over-max-tokens", min_tokens=9, max_tokens=8),
    _completion("stream-options-without-stream", stream_options=_USAGE),
    _completion("logit-bias-outside-the-vocabulary", logit_bias={"99999999": 1}),
    _completion("token-id-outside-the-vocabulary", [504, 99999999]),
    _completion("empty-prompt", ""),
    _chat("grammar-that-does-not-compile", "Hello!", structured_outputs={"regex": "("}),
    _chat(
        "unknown-tool-choice",
        "Hello!",
        tools=[WEATHER_TOOL],
        tool_choice={"type": "function", "function": {"name": "no"}},
    ),
]
