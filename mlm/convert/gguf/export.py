"""Export of the Llama family to one GGUF file for llama.cpp and programs built on it: rows of `TARGETS`.

Keys and tensor names come from the `gguf` package, the content is as llama.cpp's converter writes it.
Matrices have the chosen type, norms, biases and routers are float32. Before the file gets its name, the
tokenizer is tested on texts and, if llama.cpp is installed, the file is tested in it.
"""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, BinaryIO

import torch
from numpy.typing import NDArray
from torch import Tensor

from mlm.convert.gguf.vocabulary import compare_tokens, composes, vocabulary
from mlm.convert.huggingface.export import hf_mapping, token_ids
from mlm.convert.huggingface.llama import locations
from mlm.convert.huggingface.llama_variants import VARIANTS, model_type
from mlm.convert.locations import ForeignTensor, foreign_tensors
from mlm.convert.source import Source, open_checkpoint
from mlm.data.tokenizer import Tokenizer
from mlm.models.config import ModelConfig
from mlm.models.llama.rope import frequencies
from mlm.models.llama.settings import LlamaSettings
from mlm.runs.folder import GB
from mlm.util.errors import UserError, format_value
from mlm.util.extras import load_extra
from mlm.util.results import CREATOR, is_stream, write_result


@dataclass(frozen=True, kw_only=True)
class Target:
    """An architecture of llama.cpp, and its fixed behaviour, which no key of a file records."""

    name: str
    has_pairs: bool = False
    """True if it rotates neighbours, where `transformers` rotates halves of a head."""
    activation: str = "silu"
    fixed: Mapping[str, bool | int | float | str] = field(default_factory=dict)
    """model.options -> their only value; for options by layer a pattern."""
    required: tuple[str, ...] = ()
    """model.options that must not be 0: llama.cpp would use its own values."""
    scales: bool = False
    """True if a file holds factors of embeddings, scores, residuals and logits."""
    has_full_width: bool = False
    """True if num_heads * head_dim must equal hidden_size."""
    wide_layers: int = 0
    """Models of this many layers scale scores by (hidden_size / num_heads)^-0.5, others by head_dim^-0.5."""


_NO_NORMALISING: dict[str, bool | int] = {"router_normalise": False, "dense_layers": 0}
TARGETS = {
    "llama": Target(name="LLAMA", has_pairs=True, fixed={"bias": False}),
    "mistral": Target(name="LLAMA", has_pairs=True),
    "internlm3": Target(name="LLAMA", has_pairs=True),
    "granite": Target(name="GRANITE", has_pairs=True, scales=True),
    "starcoder2": Target(name="STARCODER2", activation="gelu_tanh"),
    "stablelm": Target(name="STABLELM"),
    "nemotron": Target(name="NEMOTRON", activation="relu2", has_full_width=True),
    "cohere": Target(name="COMMAND_R"),
    "cohere2": Target(name="COHERE2", fixed={"window_layers": "sssf", "rotary_layers": "rrrn"}),
    "glm4": Target(name="GLM4"),
    "olmo3": Target(name="OLMO2", fixed={"window_layers": "sssf", "window_rope_theta": 0.0}),
    "arcee": Target(name="ARCEE", has_pairs=True, activation="relu2", fixed={"bias": False}),
    "ernie4_5": Target(name="ERNIE4_5"),
    "glm": Target(name="CHATGLM", has_full_width=True),
    "phi3": Target(name="PHI3"),
    "seed_oss": Target(name="SEED_OSS"),
    "smollm3": Target(name="SMOLLM3", has_pairs=True, fixed={"rotary_layers": "rrrn", "window": 0}),
    "qwen2": Target(name="QWEN2"),
    "qwen3": Target(name="QWEN3"),
    "mixtral": Target(name="LLAMA", has_pairs=True, fixed={"router_normalise": True}),
    "qwen3_moe": Target(name="QWEN3MOE", fixed={"router_normalise": True, "dense_layers": 0}),
    "qwen2_moe": Target(name="QWEN2MOE", fixed={**_NO_NORMALISING, "qkv_bias": True}),
    "olmoe": Target(name="OLMOE", fixed=_NO_NORMALISING),
    "olmo2": Target(name="OLMO2"),
    "gemma": Target(name="GEMMA", activation="gelu_tanh", fixed={"tied": True}),
    "gemma2": Target(
        name="GEMMA2",
        activation="gelu_tanh",
        fixed={"tied": True, "window_layers": "sf"},
        required=("attention_softcap", "logit_softcap"),
        wide_layers=46,
    ),
    "gemma3_text": Target(
        name="GEMMA3",
        activation="gelu_tanh",
        fixed={"window_layers": "sssssf", "window_rope_theta": 1e4},
        wide_layers=62,
    ),
}
FILE_TYPES = {"f32": "ALL_F32", "f16": "MOSTLY_F16", "bf16": "MOSTLY_BF16", "q8_0": "MOSTLY_Q8_0"}
LOGIT_ERRORS = {"f32": 1e-3, "f16": 0.05, "bf16": 0.2, "q8_0": 0.25}
"""Type -> allowed root mean square error of logits in llama.cpp, in standard deviations of the logits."""
GELU_ERROR = 0.01
"""Allowed error of f32 with a GELU, which llama.cpp looks up in a table of half precision."""
LLAMA_CPP_YARN = {"rope_beta_fast": 32.0, "rope_beta_slow": 1.0, "rope_truncate": True}
"""Settings of yarn that a file does not record, and their values in llama.cpp."""


def export_problems(ckpt: str) -> list[str]:
    """Return why a checkpoint cannot become a file for llama.cpp; no tensor is read."""
    try:
        load_extra("gguf", "mlm export gguf", "gguf")
        source = open_checkpoint(ckpt)
        source.check()
        hf_mapping(source)
        if problem := model_problem(source):
            return [f"{source.path}: {problem}"]
        if source.tokenizer is not None:
            vocabulary(source.tokenizer, source.model.vocab_size)
    except UserError as error:
        return list(error.problems)
    return []


def model_problem(source: Source) -> str | None:
    model = source.model
    settings = LlamaSettings.of(model) if model.kind == "llama" else None
    kind = model.kind if settings is None else model_type(model)
    if settings is None or model.head != "language_model" or kind not in TARGETS:
        return f"{kind} with head={model.head} is not supported; supported: {', '.join(TARGETS)}"
    target = TARGETS[kind]
    if model.activation != target.activation:
        return f"model.activation={model.activation} is not supported; supported: {target.activation}"
    for name, value in target.fixed.items():
        option = getattr(settings, name)
        is_alike = option == value
        if option and isinstance(option, str) and isinstance(value, str):
            # Patterns by layer of other lengths may be equal in all layers of the model.
            layers = range(model.num_layers)
            is_alike = all(option[n % len(option)] == value[n % len(value)] for n in layers)
        if not is_alike:
            return f"llama.cpp has no {kind} with model.options.{name}={format_value(option)}"
    if target.has_full_width and settings.head_dim * model.num_heads != model.hidden_size:
        return f"llama.cpp has no {kind} with heads of other widths than hidden_size / num_heads"
    for name in target.required:
        if not getattr(settings, name):
            return f"llama.cpp has no {kind} with model.options.{name}=0"
    is_wide = target.wide_layers == model.num_layers
    scale = (model.hidden_size / model.num_heads if is_wide else settings.head_dim) ** -0.5
    if not target.scales and not math.isclose(
        settings.attention_multiplier or settings.head_dim**-0.5, scale, rel_tol=1e-6
    ):
        setting = f"model.options.attention_multiplier={settings.attention_multiplier:g}"
        return f"{setting} is not supported; llama.cpp's {kind} has {scale:g}"
    if settings.rope_scaling == "longrope":
        return "model.options.rope_scaling=longrope is not supported: llama.cpp chooses its factors once"
    if settings.rope_scaling == "llama3" and target.name != "LLAMA":
        return f"llama.cpp has no {kind} with model.options.rope_scaling=llama3"
    if settings.rope_scaling == "yarn":
        for name, value in LLAMA_CPP_YARN.items():
            if (option := getattr(settings, name)) != value:
                return f"model.options.{name}={option} is not supported; llama.cpp computes {value}"
    return None


def export_gguf(
    source: Source, out: str, kind: str, *, logits: Callable[[Tensor], Tensor] | None
) -> tuple[dict[str, object], list[str]]:
    """Write the file, with matrices of type `kind`, and test it in llama.cpp; return columns and notes.

    `logits` computes the model's logits for tokens [B, S]; None skips the test. Raises UserError.
    """
    gguf: Any = load_extra("gguf", "mlm export gguf", "gguf")
    source.digests()
    writer = prepare(gguf, source, kind)
    is_tried = logits is not None and find_spec("cyllama") is not None and not is_stream(out)

    def write(file: BinaryIO) -> None:  # raises OSError: a pipe has no position to align tensors
        writer.fout, writer.state = [file], gguf.gguf_writer.WriterState.EMPTY
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        file.flush()
        if is_tried and logits is not None:
            check_in_llama_cpp(source, out, kind, logits, Path(file.name))

    write_result(out, write)
    size = sum(tensor.nbytes for tensors in writer.tensors for tensor in tensors.values())
    columns = {"architecture#": writer.arch, "type#": kind, "GB#": f"{size / GB:.3g}"}
    notes, window = [], bounding_window(source.model)
    if source.tokenizer is None:
        notes.append(f"no tokenizer: {source.path} has none, so that llama.cpp reads token ids alone")
    elif composes(source.tokenizer):
        notes.append("llama.cpp composes no accents: text that is not in NFC is read as other tokens")
    if window:
        notes.append(f"context of {window} tokens: llama.cpp has no window in this architecture")
    if not is_tried:
        notes.append("not tried in llama.cpp: that takes a regular file, verify=true and mlm[gguf-check]")
    return columns, notes


def prepare(gguf: Any, source: Source, kind: str) -> Any:
    """Return a writer of the `gguf` package that holds all keys and tensors."""
    model = source.model
    mapping, settings, target = hf_mapping(source), LlamaSettings.of(model), TARGETS[model_type(model)]
    architecture = gguf.MODEL_ARCH[target.name]
    writer = gguf.GGUFWriter(None, gguf.MODEL_ARCH_NAMES[architecture])
    writer.add_quantized_by(CREATOR)  # lets a later export recognise and replace the file
    add_settings(gguf, writer, source, kind)
    if source.tokenizer is None:
        writer.add_tokenizer_model("none")
    else:
        add_tokenizer(writer, source, source.tokenizer)
    names = gguf.get_tensor_name_map(architecture, model.num_layers)
    if settings.rope_scaling == "llama3":
        cpu = torch.device("cpu")
        scaled = frequencies(settings, torch.float64, cpu)[0]
        plain = frequencies(replace(settings, rope_scaling="default"), torch.float64, cpu)[0]
        # llama.cpp divides each frequency by these
        writer.add_tensor(names.get_name("rope_freqs") + ".weight", (plain / scaled).float().numpy())
    row = VARIANTS[model_type(model)]
    row = replace(row, rotates_neighbours=row.rotates_neighbours or target.has_pairs)
    stored = foreign_tensors(
        locations(model, row), source.parameters, lambda name: mapping.stored_name(name, model)
    )
    groups = dict[str, list[ForeignTensor]]()  # tensors of single experts are stacked
    for name, tensor in stored.items():
        groups.setdefault(re.sub(r"(?<=\.experts)\.\d+", "", name), []).append(tensor)
    for hf_name, tensors in groups.items():
        values = [tensor.compute(source.read) for tensor in tensors]
        value = torch.stack(values) if ".experts." in hf_name else values[0]
        if settings.zero_centered_norms and hf_name.endswith("norm.weight"):
            value = 1 + value
        name = names.get_name(hf_name, try_suffixes=(".weight", ".bias"))
        data, dtype = encoded(gguf, value, "f32" if "_inp" in name else kind)
        writer.add_tensor(name, data, raw_dtype=dtype)
    return writer


def check_in_llama_cpp(
    source: Source, out: str, kind: str, logits: Callable[[Tensor], Tensor], path: Path
) -> None:
    """Compare tokens and logits in llama.cpp. Raises UserError if they differ."""
    llama = LlamaCpp(path)
    if source.tokenizer is not None:
        compare_tokens(source.tokenizer, llama.tokens)
    count = min(32, context_length(source.model))
    ids = torch.arange(count).mul(7919).remainder(source.model.vocab_size)
    expected = logits(ids[None])[0].float()
    error = ((llama.logits(ids.tolist()) - expected).square().mean().sqrt() / expected.std()).item()
    max_error = max(LOGIT_ERRORS[kind], GELU_ERROR if source.model.activation != "silu" else 0.0)
    if not error <= max_error:
        raise UserError(
            f"out={out}: llama.cpp computes other logits than mlm, by {error:.3g} standard deviations "
            f"({max_error:g} is what type={kind} rounds); nothing is written"
        )


def encoded(gguf: Any, value: Tensor, kind: str) -> tuple[NDArray[Any], Any]:
    """Return a tensor's content as stored, and its type. Vectors are float32."""
    numbers, types = value.float().contiguous().numpy(), gguf.GGMLQuantizationType
    if kind == "f32" or value.ndim == 1:
        return numbers, types.F32
    if kind == "q8_0" and value.shape[-1] % 32:  # columns that share a scale
        return gguf.quants.quantize(numbers, types.F16), types.F16
    return gguf.quants.quantize(numbers, types[kind.upper()]), types[kind.upper()]


def add_settings(gguf: Any, writer: Any, source: Source, kind: str) -> None:
    model, settings = source.model, LlamaSettings.of(source.model)
    writer.add_type("model")
    writer.add_name(str(source.manifest.state["config"]["name"]))
    writer.add_file_type(gguf.LlamaFileType[FILE_TYPES[kind]])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_vocab_size(model.vocab_size)
    writer.add_context_length(context_length(model))
    writer.add_embedding_length(model.hidden_size)
    writer.add_block_count(model.num_layers)
    is_all_experts = VARIANTS[model_type(model)].is_all_experts
    writer.add_feed_forward_length(settings.expert_ffn_size if is_all_experts else model.ffn_size)
    if settings.num_experts:
        writer.add_expert_count(settings.num_experts)
        writer.add_expert_used_count(settings.experts_per_token)
        writer.add_expert_feed_forward_length(settings.expert_ffn_size)
    writer.add_head_count_kv(settings.num_kv_heads)
    writer.add_key_length(settings.head_dim)
    writer.add_value_length(settings.head_dim)
    if settings.shared_gate:
        width = settings.shared_experts * settings.expert_ffn_size
        writer.add_expert_shared_feed_forward_length(width)
    if settings.window_layers:
        writer.add_sliding_window(settings.window)
    if settings.attention_softcap:
        writer.add_attn_logit_softcapping(settings.attention_softcap)
    if settings.logit_softcap:
        writer.add_final_logit_softcapping(settings.logit_softcap)
    writer.add_head_count(model.num_heads)
    add_eps = writer.add_layer_norm_eps if settings.layer_norm else writer.add_layer_norm_rms_eps
    add_eps(model.layer_norm_eps)
    if TARGETS[model_type(model)].scales:
        writer.add_embedding_scale(settings.embedding_multiplier)
        writer.add_attention_scale(settings.attention_multiplier or settings.head_dim**-0.5)
        writer.add_residual_scale(settings.residual_multiplier)
        writer.add_logit_scale(1 / settings.logit_multiplier)  # it divides by this
    elif settings.logit_multiplier != 1:
        writer.add_logit_scale(settings.logit_multiplier)
    if settings.parallel:
        writer.add_parallel_residual(True)
    writer.add_rope_dimension_count(settings.rotary_dim)
    writer.add_rope_freq_base(settings.rope_theta)
    if settings.rope_scaling in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType[settings.rope_scaling.upper()])
        writer.add_rope_scaling_factor(settings.rope_factor)
    if settings.rope_scaling == "yarn":
        writer.add_rope_scaling_orig_ctx_len(settings.rope_original_positions)
        usual = 0.1 * math.log(settings.rope_factor) + 1.0
        writer.add_rope_scaling_attn_factors((settings.rope_attention_factor or usual) / usual)


def context_length(model: ModelConfig) -> int:
    return min(bounding_window(model) or model.max_positions, model.max_positions)


def bounding_window(model: ModelConfig) -> int:
    """Return the window of a model if llama.cpp's architecture has none and attends to all tokens, else 0."""
    has_windows = "window_layers" in TARGETS[model_type(model)].fixed
    return 0 if has_windows else LlamaSettings.of(model).window


def add_tokenizer(writer: Any, source: Source, tokenizer: Tokenizer) -> None:
    vocab, ids = vocabulary(tokenizer, source.model.vocab_size), token_ids(source)
    writer.add_tokenizer_model(vocab.model)
    writer.add_tokenizer_pre(vocab.pre)
    writer.add_token_list(vocab.tokens)
    writer.add_token_types(vocab.types)
    if vocab.scores is None:
        pairs = [[part.replace(" ", "\u0120") for part in pair] for pair in vocab.merges]
        writer.add_token_merges([" ".join(pair) for pair in pairs])
    else:
        writer.add_token_scores(vocab.scores)
        writer.add_add_space_prefix(vocab.adds_space)
    for name, id in (("bos", ids.bos), ("eos", ids.eod), ("pad", ids.pad)):
        if id is not None:
            getattr(writer, f"add_{name}_token_id")(id)
    writer.add_add_bos_token(tokenizer.adds_bos)
    if tokenizer.chat_template is not None:
        writer.add_chat_template(tokenizer.chat_template.source)


class LlamaCpp:
    """A GGUF file in llama.cpp, on the CPU, where the extra gguf-check is installed.

    Raises RuntimeError and ValueError for a file that it does not load.
    """

    def __init__(self, path: Path) -> None:
        self._api: Any = load_extra("cyllama.llama.llama_cpp", "mlm export gguf", "gguf-check")
        self._api.disable_logging()
        params = self._api.LlamaModelParams()
        params.n_gpu_layers = 0
        # cyllama 0.2.18 asks the model for n_vocab, which its vocabulary has.
        n_vocab = property(lambda model: model.get_vocab().n_vocab)
        model_class = type("Model", (self._api.LlamaModel,), {"n_vocab": n_vocab})
        self._model = model_class(path_model=str(path), params=params)
        self._vocabulary = self._model.get_vocab()

    def tokens(self, text: str, *, add_special: bool = False) -> list[int]:
        """Return the tokens of a text in which names of special tokens are text.

        `add_special` includes the tokens that the tokenizer adds at the ends.
        """
        return list(self._vocabulary.tokenize(text, add_special, False)) if text else []

    def logits(self, ids: list[int]) -> Tensor:
        """Return the logits of a sequence: [S] -> [S, V], float32."""
        params = self._api.LlamaContextParams()
        params.n_ctx = params.n_batch = len(ids)
        params.type_k = params.type_v = 0  # keys, values and scores in float32
        params.flash_attn_type = 0
        context, rows = self._api.LlamaContext(model=self._model, params=params), []
        batch = self._api.LlamaBatch(n_tokens=1, embd=0, n_seq_max=1)
        for position, id in enumerate(ids):
            batch.reset()
            batch.add(id, position, [0], True)
            context.decode(batch)
            rows.append(list(context.get_logits()))
        context.close()
        return torch.tensor(rows)
