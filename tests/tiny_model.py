"""A tiny model and a tiny project around it, made on the spot: a random Llama of two layers, and xlam-shaped rows.

Nothing is downloaded and the same bytes come out each time. ``write_tiny_model`` makes a model directory as Hugging
Face has it; ``ROWS`` are raw rows, each with the reason that ought to drop it; ``write_project`` puts both to work.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer

HIDDEN, INTERMEDIATE, LAYERS, HEADS, KEY_VALUE_HEADS, POSITIONS = 32, 48, 2, 4, 2, 512
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
SENTENCES = (
    'Answer by calling the functions below: reply with one JSON object {"name": ..., "arguments": ...}, '
    "or with an array of such objects for several calls, and nothing else.",
    '[{"description":"Weather of a city","name":"get_weather","parameters":{"city":{"type":"string"}}}]',
    "What is the weather like in city number 17 today?",
    '{"name":"get_weather","arguments":{"city":"city 17"}}',
)


RUN = "run"  # the run directory of a project


class Outcome(NamedTuple):
    """How a command line ended: exit code, stdout, stderr."""

    code: int
    out: str
    err: str


Kiln = Callable[..., Outcome]  # what the fixtures ``kiln`` and ``kiln_process`` are


def write_tiny_model(directory: Path, seed: int = 7) -> Path:
    """A whole model directory: weights, config, tokenizer, chat template. Equal bytes for an equal seed."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = _tokenizer()
    tokenizer.save(str(directory / "tokenizer.json"))
    vocabulary = tokenizer.get_vocab_size()
    save_file(_weights(vocabulary, seed), str(directory / "model.safetensors"), metadata={"format": "pt"})
    _write_json(directory / "config.json", _config(vocabulary))
    _write_json(
        directory / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<|endoftext|>",
            "eos_token": "<|im_end|>",
            "pad_token": "<|endoftext|>",
            "model_max_length": POSITIONS,
        },
    )
    (directory / "chat_template.jinja").write_text(CHATML, encoding="utf-8")
    return directory


def _tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevelDecoder()
    specials = [AddedToken(text, special=True, normalized=False) for text in SPECIAL_TOKENS]
    trainer = BpeTrainer(
        vocab_size=384, special_tokens=specials, initial_alphabet=ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(SENTENCES * 2, trainer)
    return tokenizer


def _config(vocabulary: int) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "bos_token_id": 0,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "head_dim": HIDDEN // HEADS,
        "hidden_act": "silu",
        "hidden_size": HIDDEN,
        "initializer_range": 0.02,
        "intermediate_size": INTERMEDIATE,
        "max_position_embeddings": POSITIONS,
        "mlp_bias": False,
        "num_attention_heads": HEADS,
        "num_hidden_layers": LAYERS,
        "num_key_value_heads": KEY_VALUE_HEADS,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
        "vocab_size": vocabulary,
    }


def _weights(vocabulary: int, seed: int) -> dict[str, np.ndarray[Any, Any]]:
    random = np.random.Generator(np.random.PCG64(seed))
    narrow = HIDDEN // HEADS * KEY_VALUE_HEADS
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocabulary, HIDDEN)}
    for layer in range(LAYERS):
        at = f"model.layers.{layer}."
        shapes |= {
            at + "self_attn.q_proj.weight": (HIDDEN, HIDDEN),
            at + "self_attn.k_proj.weight": (narrow, HIDDEN),
            at + "self_attn.v_proj.weight": (narrow, HIDDEN),
            at + "self_attn.o_proj.weight": (HIDDEN, HIDDEN),
            at + "mlp.gate_proj.weight": (INTERMEDIATE, HIDDEN),
            at + "mlp.up_proj.weight": (INTERMEDIATE, HIDDEN),
            at + "mlp.down_proj.weight": (HIDDEN, INTERMEDIATE),
        }
    weights = {name: (random.standard_normal(shape) * 0.1).astype(np.float32) for name, shape in shapes.items()}
    norms = [f"model.layers.{layer}.{name}_layernorm.weight" for layer in range(LAYERS) for name in _NORMS]
    return weights | {name: np.ones(HIDDEN, dtype=np.float32) for name in [*norms, "model.norm.weight"]}


_NORMS = ("input", "post_attention")


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n", encoding="utf-8")


class RawRow(NamedTuple):
    """A line of the raw file, the example id it gets (None: it never has one), and why prepare drops it, if it does."""

    line: bytes
    example_id: str | None
    reason: str | None
    query: str | None = None


TOOLS = [{"name": "get_weather", "description": "Weather of a city", "parameters": {"city": {"type": "string"}}}]
LONG_ROWS = 4  # valid rows that are longer than the project's [admit] max_tokens
VALID_ROWS = 30
MAX_TOKENS = 192


def raw_rows() -> list[RawRow]:
    """Forty-eight rows: thirty valid ones (four of them long), and at least one for each reason a row can show."""
    rows = [_valid(number) for number in range(VALID_ROWS)]
    for place, row in enumerate(_invalid()):  # in among the valid ones, never before the first
        rows.insert(3 + 2 * place, row)
    return rows


def _valid(number: int) -> RawRow:
    query = f"What is the weather like in city number {number} today?"
    if number % 8 == 5:
        query += " Please think of " + " ".join(f"zq{number}x{word}" for word in range(40))
    if number == 12:
        query += " Ignore <|im_end|> in this text."
    return _row(number, query, TOOLS, [{"name": "get_weather", "arguments": {"city": f"city {number}"}}])


def _invalid() -> list[RawRow]:
    call = [{"name": "get_weather", "arguments": {}}]
    ask = "What is the weather in the town called {}?".format
    return [
        _row(100, "   ", TOOLS, call, "missing_query"),
        _row(101, ask("A"), None, call, "missing_tools"),
        _row(102, ask("B"), TOOLS, None, "missing_answers"),
        _row(103, "Weather?", TOOLS, call, "query_too_short"),
        _row(104, "What? " * 400, TOOLS, call, "query_too_long"),
        _row(105, ask("C"), '[{"name": ', call, "invalid_tools_json"),
        _row(106, ask("D"), [{"name": "f"}], call, "invalid_tool_shape"),
        _row(107, ask("E"), TOOLS, "[{]", "invalid_answers_json"),
        _row(108, ask("F"), TOOLS, [], "invalid_answer_shape"),
        _row(109, ask("G"), TOOLS, call * 2, "multi_call_answer"),
        _row(110, "what is  the WEATHER like in city number 0 today?", TOOLS, call, "duplicate_query"),
        _row(111, " What is the weather like in city number 1 today? ", TOOLS, call, "duplicate_query"),
        _row(0, ask("H"), TOOLS, call, "duplicate_example_id"),
        RawRow(b'{"id": 113, "query": "\xff\xfe"}', None, "invalid_utf8"),
        RawRow(b'{"id": 114, "query": "cut', None, "invalid_row_json"),
        RawRow(b'{"id": 115, "id": 115, "query": "twice"}', None, "invalid_row_json"),
        RawRow(b'["no", "object"]', None, "row_not_object"),
        _row(" ", ask("I"), TOOLS, call, "invalid_example_id"),
    ]


def _row(identity: object, query: str, tools: object, answers: object, reason: str | None = None) -> RawRow:
    value: dict[str, object] = {"id": identity, "query": query}
    for name, field in (("tools", tools), ("answers", answers)):
        if field is not None:
            value[name] = field if isinstance(field, str) else json.dumps(field)
    example_id = None if reason == "invalid_example_id" else f"raw:{identity}"
    return RawRow(json.dumps(value).encode("utf-8"), example_id, reason, query.strip())


CONFIG = """schema = "kiln.config.v1"

[project]
name = "tiny"
seed = 42

[model]
path = "model"
id = "tiny-llama"

[[datasets]]
language = "en"
path = "raw.jsonl"
source = "xlam"

[data]
n_train = 16
n_validation = 5
n_test = 5

[admit]
max_tokens = {max_tokens}
invalid_row_policy = "skip"

[train]
adapter = "tiny"
epochs = 2
lora_rank = 2
lora_alpha = 4.0
learning_rate = 0.01
checkpoint_interval = 5
threads = 1
"""


def write_project(directory: Path, model: Path, *, config: str = CONFIG) -> Path:
    """``kiln.toml`` and ``raw.jsonl`` in a directory, and the model as ``model`` (a symbolic link). Returns the config.

    ``{max_tokens}`` in the config becomes a cap that the long rows exceed and the others do not.
    """
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "raw.jsonl").write_bytes(b"".join(row.line + b"\n" for row in raw_rows()))
    if not (directory / "model").exists():
        (directory / "model").symlink_to(model, target_is_directory=True)
    path = directory / "kiln.toml"
    path.write_text(config.replace("{max_tokens}", str(MAX_TOKENS)), encoding="utf-8")
    return path
