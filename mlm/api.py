"""The Python API: a trained model that computes logits, generates, scores and predicts; import and export.

Public as `mlm.load`, `mlm.import_hf` and `mlm.export_hf`.

Shapes: B sequences, S tokens, V vocabulary.
"""

import logging
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar, cast, overload

import torch
from torch import Tensor, nn

from mlm.config.fields import Role, path_argument
from mlm.convert.huggingface.export import export_model, export_problems
from mlm.convert.huggingface.importing import import_adapters, import_model, import_problems, is_adapter
from mlm.convert.source import NoTokenizerError, open_checkpoint
from mlm.data.chat_template import ChatError
from mlm.data.chat_tokens import encode_prompt, end_of_turn_tokens
from mlm.data.conversation import make_conversation
from mlm.data.sampler import Batch
from mlm.data.tokenizer import Tokenizer
from mlm.finetune.predict import predict
from mlm.inference.config import Sampling, resolve_sampling
from mlm.inference.generation import generate, stop_check, truncate_at_stop
from mlm.inference.scoring import rolling_windows, score
from mlm.inference.trained import LoadedModel, load_trained, open_for_layout, prediction_problem
from mlm.launch.join import build_mesh
from mlm.models.backbone import Transformer
from mlm.models.config import ModelConfig
from mlm.models.gpt2.model import GPT2
from mlm.models.shape import count_parameters
from mlm.optim.config import PrecisionConfig
from mlm.optim.precision import DTYPES
from mlm.parallel.collectives import broadcast
from mlm.parallel.config import ParallelConfig
from mlm.parallel.logits import loss_dtype
from mlm.parallel.mesh import ParallelContext
from mlm.util.errors import ConfigError, Problem, UserError, lone_surrogate, type_of
from mlm.verify.huggingface import compare_logits, extra_problems

log = logging.getLogger(__name__)

Text = TypeVar("Text", str, list[str])
FORMATS = ("fp32", "bf16", "fp16", "fp64")
"""Number formats of a loaded model; tf32 is for training."""
FORMAT_BY_NAME = {
    name: short
    for short in FORMATS
    for name in (short, DTYPES[short], str(DTYPES[short]), str(DTYPES[short]).removeprefix("torch."))
}
"""Each of FORMATS by its names: in settings, as torch's dtype, and as torch prints that."""


def load(
    ckpt: str | Path,
    *,
    tp: int = 1,
    pp: int = 1,
    precision: str | torch.dtype = "fp32",
    device: str | torch.device = "auto",
    tokenizer: str | Path | None = None,
    ctx: ParallelContext | None = None,
) -> "Model":
    """Load a trained model at any layout, independent of its layout in training. Collective over all ranks.

    Args:
        ckpt: Run directory (its latest checkpoint; of a finetuned run the best), checkpoint (step-…), or
            Hugging Face folder or id.
        tp: Tensor-parallel size; more than 1 under torchrun or SLURM.
        pp: Pipeline-parallel size.
        precision: Number format of weights and activations: fp32, bf16, fp16, fp64, or torch's names.
        device: auto, cpu or cuda.
        tokenizer: tokenizer.json, or a folder with a tokenizer; None takes the one saved with the model.
        ctx: Process groups of `build_mesh` with cp=1, in place of tp, pp and device.

    Raises:
        UserError: There is no such checkpoint, it is damaged, or it cannot be split so.
    """
    name, dtype = path_argument("ckpt", ckpt), _precision(precision)
    named_tokenizer = None if tokenizer is None else path_argument("tokenizer", tokenizer)
    if ctx is None:
        ctx = build_mesh(tp=tp, pp=pp, device=device)
    if not isinstance(ctx, ParallelContext):
        raise TypeError(f"ctx: {type_of(ctx)}, not a ParallelContext; pass what build_mesh returns")
    if ctx.cp.size > 1:
        raise UserError(f"ctx: cp={ctx.cp.size}: loaded models read whole sequences; build a mesh with cp=1")
    layout = ParallelConfig(tp=ctx.tp.size, pp=ctx.pp.size)
    source = open_for_layout(name, layout)
    trained = load_trained(source, layout, PrecisionConfig(dtype=dtype), ctx)  # type: ignore[arg-type]
    for chunk in trained.model.chunks:
        chunk.to(trained.model.dtype)  # half precision: no float32 copy, no cast at each use
        chunk.eval()
    model = Model(trained, ctx, named_tokenizer)
    if tokenizer is not None:
        assert model.tokenizer, "read now, so that its problems show here"
    return model


def _precision(value: object) -> str:
    """Return the name of a number format in settings. Raises UserError."""
    try:
        return FORMAT_BY_NAME[value]  # type: ignore[index]
    except (KeyError, TypeError):
        fix = f"use {', '.join(FORMATS)}"
        raise UserError(f"precision={value}: no such number format", keys=("precision",), fix=fix) from None


def _check_batch_size(value: object) -> None:
    if type(value) is not int or value < 1:
        problem = f"batch_size={value!r}: must be an integer, at least 1"
        raise UserError(problem, keys=("batch_size",), fix="pass 8")


def _stops(options: Sampling, stop: str | Sequence[str]) -> list[str]:
    problems, stops = options.problems(), _listed("stop", stop)
    if "" in stops:
        problems.append(Problem.at("stop", '""', "would end every continuation at once", "omit it"))
    if problems:
        raise ConfigError(problems)
    return stops


def _listed(key: str, value: str | Sequence[str]) -> list[str]:
    """Return a text or texts as a list. Raises TypeError; UserError for half a surrogate pair."""
    texts = list(value) if isinstance(value, Iterable) and not isinstance(value, str | bytes) else [value]
    if wrong := [text for text in texts if not isinstance(text, str)]:
        raise TypeError(f"{key}: {type_of(wrong[0])}, not a str or a list of str")
    if half := next(filter(None, map(lone_surrogate, texts)), None):
        raise UserError(f"{key}: holds {half}, no UTF-8: correct it")
    return texts


class Model:
    """A trained model, or this rank's part of one, as `load` returns it.

    Under torchrun every rank calls a method with the same arguments, and gets the same result.

    Attributes:
        path: Its checkpoint (step-…), or the Hugging Face folder.
        config: Shape of the model, a `ModelConfig`: num_layers, hidden_size, vocab_size, head, …
        device: `torch.device` of this rank's weights.
        dtype: `torch.dtype` of weights and activations.
        ctx: Process groups.
        chunks: This rank's modules, in eval mode: the full model if tp = pp = 1.
        trained: The `LoadedModel`, with its settings and manifest.
        tokenizer: `encode` and `decode`; read when first used.
    """

    def __init__(self, trained: LoadedModel, ctx: ParallelContext, tokenizer: str | None = None) -> None:
        self.trained, self.ctx, self._named_tokenizer = trained, ctx, tokenizer
        self.path: Path = trained.path
        self.config: ModelConfig = trained.config.model
        self.device: torch.device = ctx.device
        self.dtype: torch.dtype = trained.model.dtype
        self.chunks: list[nn.Module] = list(trained.model.chunks)

    def __repr__(self) -> str:
        layout = f"tp={self.ctx.tp.size}, pp={self.ctx.pp.size}"
        return (
            f"Model({self.path}, {self.config.kind}, {count_parameters(self.config):,} parameters, {layout})"
        )

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer: `encode` and `decode`. Raises UserError if there is none."""
        try:
            return self.trained.source.load_tokenizer(self._named_tokenizer)
        except NoTokenizerError as error:
            raise UserError(
                f"{self.path}: no tokenizer is saved with it; pass tokenizer=FILE or FOLDER of the tokenizer "
                "it was trained with to mlm.load"
            ) from error

    def generate(
        self,
        prompt: Text,
        *,
        stop: str | Sequence[str] = (),
        special_tokens: bool = False,
        **options: Any,
    ) -> Text:
        """Return the continuation of a prompt, or of each prompt of a list, without the prompt.

        Prompt i of a list draws like line i of a file in `mlm generate`: repeat a prompt to get several
        samples. The tokenizer's opening tokens precede each prompt, as in `transformers`; a continuation
        ends at any end token that the model declares.

        Args:
            prompt: Text, or texts; an empty one begins a document.
            stop: Strings that end a continuation, which is truncated before the first of them.
            special_tokens: Encode names of special tokens in a prompt, such as <|endoftext|>, as such tokens.
            options: Sampling options, with the names and defaults of `mlm generate` (SamplingOptions in
                mlm/inference/config.py): max_new_tokens, temperature, top_k, … Draws depend on neither the
                layout nor batch_size.
        """
        prompts = _listed("prompt", prompt)
        if not isinstance(special_tokens, bool):
            raise TypeError(f"special_tokens: {type_of(special_tokens)}; pass True or False")
        self._check_predicts_tokens(causal=True)
        tokenizer = self.tokenizer
        sampling = resolve_sampling(tokenizer.declared.generation, options)
        stops = _stops(sampling, stop)
        ids = [tokenizer.encode_prompt(text, special_tokens=special_tokens) for text in prompts]
        texts = self._continue(ids, sampling, stops, tokenizer.end_ids)
        return texts[0] if isinstance(prompt, str) else texts

    def chat(
        self,
        messages: Any,
        *,
        tools: Sequence[Any] | None = None,
        chat_template: str | Path | None = None,
        stop: str | Sequence[str] = (),
        **options: Any,
    ) -> Any:
        """Return the answer to a conversation, or to each conversation of a list.

        `messages` is the text of one message of the user, or a list of messages such as {"role": "user",
        "content": "…"}, or a list of such lists. The tokenizer's chat template, or the Jinja file
        `chat_template`, renders them and `tools`, descriptions of functions. An answer ends at the template's
        end of a turn, or at an end token of generation_config.json. Names of special tokens in messages are
        plain characters. `options` are those of `generate`: max_new_tokens, temperature, …

        Raises:
            UserError: There is no template, or it cannot render the messages.
        """
        self._check_predicts_tokens(causal=True)
        tokenizer = self.tokenizer
        sampling = resolve_sampling(tokenizer.declared.generation, options)
        stops = _stops(sampling, stop)
        file = None if chat_template is None else path_argument("chat_template", chat_template)
        template = self.trained.source.load_chat_template(
            file, self._named_tokenizer, tokenizer, key="chat_template"
        )
        is_batch = isinstance(messages, list) and bool(messages) and not isinstance(messages[0], Mapping)
        ids = []
        try:
            for turns in messages if is_batch else [messages]:
                turns = [{"role": "user", "content": turns}] if isinstance(turns, str) else turns
                conversation = make_conversation({"tools": tools}, turns)
                ids.append(encode_prompt(conversation, tokenizer, template))
        except ChatError as error:
            raise UserError(f"messages: {error}") from error
        answers = self._continue(ids, sampling, stops, end_of_turn_tokens(template, tokenizer))
        return answers if is_batch else answers[0]

    def _continue(
        self, ids: Sequence[list[int]], options: Sampling, stops: Sequence[str], end_ids: Collection[int]
    ) -> list[str]:
        """Return the text after each prompt's tokens, up to one of `end_ids` or before one of `stops`."""
        tokenizer, longest = self.tokenizer, self.config.max_positions
        for number, tokens in enumerate(ids):
            if len(tokens) > longest:
                log.warning("prompt %d: of its %d tokens the last %d are read", number, len(tokens), longest)
        until = stop_check(tokenizer, stops)
        new = generate(self.trained, ids, options, ctx=self.ctx, end_ids=end_ids, until=until)
        return [truncate_at_stop(tokenizer.decode(tokens), stops) for tokens in new]

    def logits(self, tokens: Tensor | Sequence[Sequence[int]]) -> Tensor:
        """Return the logits at each token: int64 [B, S] -> [B, S, V], on every rank.

        A GPT-2 predicts the next token. A BERT predicts the token itself by its masked-LM head, in sequences
        of one segment with the special tokens it was trained with. All sequences have S tokens. float32
        (float64 for precision=fp64), on the model's device, without gradients. V is the vocabulary without
        padding.
        """
        self._check_predicts_tokens()
        batch = self._batch(tokens)

        def forward(chunk: Transformer, batch: Batch, x: Tensor | None) -> Tensor:
            return cast(GPT2, chunk).logits(batch.tokens, x)

        model, pp, size = self.trained.model, self.ctx.pp, self.config.vocab_size
        outputs = [y.contiguous() for _, y in model.evaluate([Batch(batch, batch, 0)], forward)]
        if not outputs:  # on all stages but the last
            outputs = [batch.new_empty(*batch.shape, size, dtype=loss_dtype(model.dtype))]
        return broadcast(outputs[0], pp, pp.size - 1)

    def _batch(self, tokens: Tensor | Sequence[Sequence[int]]) -> Tensor:
        """Return tokens [B, S] on the model's device. Raises UserError unless the model can read them."""
        longest, size = self.config.max_positions, self.config.vocab_size
        try:
            tokens = torch.as_tensor(tokens)
        except (RuntimeError, TypeError, ValueError) as error:
            raise TypeError(f"tokens: not int64 [B, S] ({error}); use torch.tensor([ids])") from error
        form = f"{str(tokens.dtype).removeprefix('torch.')} {list(tokens.shape)}"
        if not tokens.numel():
            raise UserError(f"tokens: an empty batch, {form}; give a sequence of one token or more")
        if tokens.dtype != torch.int64 or tokens.dim() != 2:
            raise UserError(f"tokens: {form}, not int64 [B, S]; use torch.tensor([ids])")
        if tokens.shape[1] > longest:
            raise UserError(
                f"tokens: S={tokens.shape[1]} is more than max_positions={longest}; truncate them"
            )
        if int(tokens.min()) < 0 or int(tokens.max()) >= size:
            raise UserError(f"tokens: ids must be 0 to {size - 1}; encode with the model's tokenizer")
        return tokens.to(self.device)

    @overload
    def score(self, texts: str, *, batch_size: int = ...) -> float: ...

    @overload
    def score(self, texts: list[str], *, batch_size: int = ...) -> list[float]: ...

    def score(self, texts: str | list[str], *, batch_size: int = 8) -> float | list[float]:
        """Return the log-likelihood in nats of a document, or of each document of a list.

        It is the sum over the document's tokens of log p(token | tokens before it). The first is predicted
        after the tokenizer's `prefix_id`, which is not scored. A document of more than max_positions tokens
        is scored in windows of max_positions, each token once: a window has the last token of the window
        before as its context, and the last window is moved back to be full. Equal to lm-eval's
        `loglikelihood_rolling`. An empty document has 0.

        Args:
            texts: Document, or documents.
            batch_size: Documents of max_positions tokens per micro-batch; scores do not depend on it.
        """
        documents = _listed("texts", texts)
        self._check_predicts_tokens(causal=True)
        _check_batch_size(batch_size)
        tokenizer, longest = self.tokenizer, self.config.max_positions
        windows = [
            list(rolling_windows(tokenizer.encode(d), tokenizer.prefix_id, longest)) for d in documents
        ]
        requests = [request for document in windows for request in document]
        scores = iter(score(self.trained, requests, batch_size=batch_size, ctx=self.ctx))
        sums = [0.0 - math.fsum(next(scores).loss for _ in document) for document in windows]  # never -0.0
        return sums[0] if isinstance(texts, str) else sums

    def predict(self, texts: Any, *, batch_size: int = 8) -> Any:
        """Return a finetuned model's answer to a text, or to each text of a list.

        A text is a str; for a task of several columns a tuple in the order of its `columns`, or a dict by
        column, for kind choice {"article": …, "question": …, "options": […]}. The type of an answer depends
        on the kind of task:

        - classification, choice: {"label": name, "probabilities": {name: share}}
        - regression: a float
        - span: the words, "" for no answer
        - a custom kind: the value of its prediction

        Answers equal the predictions of `mlm eval TASK`. A text that is too long is truncated as in training.

        Args:
            texts: Text, or a list of them.
            batch_size: Texts of task.max_length tokens per micro-batch; no answer depends on it.
        """
        _check_batch_size(batch_size)
        rows = texts if isinstance(texts, list) else [texts]
        answers = predict(self.trained, self.tokenizer, rows, batch_size=batch_size)
        return answers if isinstance(texts, list) else answers[0]

    def _check_predicts_tokens(self, *, causal: bool = False) -> None:
        """Raise UserError unless the model predicts tokens; with `causal` the next one."""
        if problem := prediction_problem(str(self.path), self.config, causal=causal):
            raise UserError(problem)


def import_hf(
    source: str | Path,
    out: str | Path,
    *,
    base: str | Path | None = None,
    revision: str | None = None,
    verify: bool = True,
) -> Path:
    """Write a Hugging Face model as a run directory, as `mlm import hf` does; return the directory.

    Args:
        source: Folder with config.json and model.safetensors, or with adapters that `peft` wrote, or the id
            of a model on the Hub.
        out: Run directory to write, a new folder.
        base: Model that adapters were trained on; None takes the one that their folder names.
        revision: Branch, tag or commit on the Hub.
        verify: Compare logits with `transformers`, and write nothing where they differ. Adapters are not
            compared.

    Raises:
        UserError: The model is not supported, `out` is not free, or the logits differ.
    """
    source, out = path_argument("source", source), path_argument("out", out, Role.FOLDER)
    named_base, holds_adapters = None if base is None else path_argument("base", base), is_adapter(source)
    is_compared = verify and not holds_adapters
    if problems := [*import_problems(source, out, revision, named_base), *extra_problems(is_compared)]:
        raise ConfigError(problems)
    if holds_adapters:
        import_adapters(Path(source), Path(out), base=named_base)
    else:
        import_model(source, Path(out), revision=revision, compare=compare_logits if verify else None)
    return Path(out)


def export_hf(
    ckpt: str | Path,
    out: str | Path,
    *,
    max_file_gb: float = 5.0,
    verify: bool = True,
    merge: bool = False,
) -> Path:
    """Write a checkpoint as a folder that `transformers` loads, as `mlm export hf` does; return the folder.

    Args:
        ckpt: Run directory (its latest checkpoint; of a finetuned run the best) or checkpoint (step-…).
        out: Folder to write, a new one.
        max_file_gb: Largest .safetensors file, in 10^9 bytes.
        verify: Compare logits with `transformers`, and write nothing where they differ.
        merge: Add adapters to the weights of their base; else they are written alone, as `peft` loads them.

    Raises:
        UserError: The model is not supported, `out` is not free, or the logits differ.
    """
    ckpt, out = path_argument("ckpt", ckpt), path_argument("out", out, Role.FOLDER)
    if problems := [*export_problems(ckpt, out, max_file_gb), *extra_problems(verify)]:
        raise ConfigError(problems)
    compare = compare_logits if verify else None
    export_model(open_checkpoint(ckpt), Path(out), max_file_gb=max_file_gb, merge=merge, compare=compare)
    return Path(out)
