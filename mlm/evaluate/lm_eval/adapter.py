"""Our checkpoints as a model of EleutherAI's lm-eval (pip install 'mlm[lm-eval]').

    mlm-lm-eval --model mlm --model_args ckpt=runs/shakespeare --tasks lambada_openai
    torchrun --nproc-per-node 2 -m mlm.evaluate.lm_eval --model mlm …

Under torchrun every rank of a host runs lm-eval on all requests, and the replicas share their scoring; the
first writes the results.

`mlm-lm-eval`, or `python -m mlm.evaluate.lm_eval`, is lm-eval's command line with the model `mlm` registered:
lm-eval (0.4) finds models of other packages only when these are imported. In Python, import this module
before `lm_eval.simple_evaluate(model="mlm", model_args=…)`.

model_args are the fields of `LmEvalConfig`, with `precision=bf16` for precision.dtype and `device=cpu` for
dist.device. Names of special tokens in texts are plain characters. A text begins with the tokenizer's opening
tokens, as in lm-eval's `hf`, unless `add_bos_token` specifies otherwise.
"""

import os
from collections.abc import Sequence
from typing import Any

import numpy as np
from lm_eval.api.instance import Instance
from lm_eval.api.model import CacheHook, TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs, postprocess_generated_text
from lm_eval.utils import simple_parse_args_string
from tqdm import tqdm

from mlm.checkpoint.native.exchange import Ranks
from mlm.config.build import build
from mlm.convert.source import Source
from mlm.evaluate.lm_eval.config import LmEvalConfig
from mlm.inference.config import DECLARED, Sampling, declared_sampling
from mlm.inference.generation import generate, stop_check
from mlm.inference.scoring import Request, Score, rolling_windows, score
from mlm.inference.trained import load_trained, open_predictor
from mlm.launch.environment import read_rank_position
from mlm.launch.join import build_mesh
from mlm.launch.rules.checks import checked_by, checkpoint_exists, devices_exist, tokenizer_exists
from mlm.launch.rules.layout import READER_RULES
from mlm.launch.start import launch_facts
from mlm.util.errors import ConfigError, UserError
from mlm.util.files import digest_bytes

check_settings = checked_by(READER_RULES, (devices_exist, checkpoint_exists, tokenizer_exists))
Tokens = list[int]
EncodedRequest = tuple[tuple[str, str] | None, Tokens, Tokens]
"""lm-eval's cache key, the context, and the continuation to score."""


@register_model("mlm")
class MlmLM(TemplateLM):
    """A checkpoint as a model of lm-eval. Raises UserError for wrong arguments."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__()
        config, self.source = settings(arguments)
        self.settings = config
        self.tokenizer = self.source.load_tokenizer(config.tokenizer)
        longest = self.source.model.max_positions
        self.max_length = min(config.max_length or longest, longest)
        self.batch_size = config.batch_size
        parallel, dist = config.parallel, config.dist
        self.ctx = build_mesh(tp=parallel.tp, pp=parallel.pp, device=dist.device, timeout_s=dist.timeout_s)
        self.trained = load_trained(self.source, config.parallel, config.precision, self.ctx)

    @classmethod
    def create_from_arg_obj(
        cls, arg_dict: dict[str, Any], additional_config: dict[str, Any] | None = None
    ) -> "MlmLM":
        """Build the model from model_args and lm-eval's flags; model_args take precedence.

        lm-eval passes all its flags, typed or not, and its own method fails on a key in both.
        """
        flags = {key: value for key, value in (additional_config or {}).items() if value is not None}
        return cls(**(flags | arg_dict))

    @classmethod
    def create_from_arg_string(
        cls, arg_string: str, additional_config: dict[str, Any] | None = None
    ) -> "MlmLM":
        return cls.create_from_arg_obj(simple_parse_args_string(arg_string), additional_config)

    @property
    def eot_token_id(self) -> int:
        """The tokenizer's declared end of a text, else its end of a document."""
        name = self.tokenizer.declared.names.get("eos_token")
        return self.tokenizer.id_of(name) if name and name in self.tokenizer else self.tokenizer.eod_id

    @property
    def prefix_token_id(self) -> int:
        """The token before a text without context: beginning of a text, else its end, as in `hf`."""
        return self.eot_token_id if self._bos is None else self._bos

    @property
    def _bos(self) -> int | None:
        """The tokenizer's declared beginning of a text, None for a declared null; else the default."""
        name = self.tokenizer.declared.names.get("bos_token")
        if name == "":
            return None
        return self.tokenizer.id_of(name) if name and name in self.tokenizer else self.tokenizer.bos_id

    @property
    def tokenizer_name(self) -> str:
        return f"{self.tokenizer.digest}{self.settings.add_bos_token}"

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> Tokens:
        """Return the opening tokens, by `add_bos_token`, and the ids of a text."""
        opening, adds_bos = self.tokenizer.opening, self.settings.add_bos_token
        if add_special_tokens is None:
            if adds_bos is not None:
                opening = [self._bos] if adds_bos and self._bos is not None else []
            if string.startswith(self.tokenizer.name_of(self.prefix_token_id)):
                opening = []
        return [*(opening if add_special_tokens is not False else ()), *self.tokenizer.encode(string)]

    def get_model_info(self) -> dict[str, Any]:
        return {"mlm_ckpt": str(self.source.path), "model_dtype": self.settings.precision.dtype}

    def _loglikelihood_tokens(
        self, requests: Sequence[EncodedRequest], disable_tqdm: bool = False, **kwargs: Any
    ) -> list[tuple[float, bool]]:
        """Return (log-likelihood in nats, is greedy) per continuation; long contexts lose their beginning."""
        scored = list[Request]()
        for _, context, continuation in requests:
            if not 1 <= len(continuation) <= self.max_length:
                raise UserError(
                    f"a continuation of {len(continuation)} tokens cannot be scored: give 1 to max_length="
                    f"{self.max_length} of them"
                )
            tokens = (context + continuation)[-(self.max_length + 1) :]
            scored.append(Request(np.array(tokens, dtype=np.int64), len(tokens) - len(continuation)))
        answers = [(-s.loss, s.is_greedy) for s in self._scores(scored, disable_tqdm)]
        for (key, *_), answer in zip(requests, answers, strict=True):
            if key is not None:
                self.cache_hook.add_partial("loglikelihood", key, answer)
        return answers

    def set_cache_hook(self, cache_hook: CacheHook) -> None:
        """Set the hook of a cache (--use_cache). Raises UserError unless the cache is the same on every rank.

        A kill may leave caches that differ: lm-eval does not call a rank whose cache holds all requests of a
        type, and the other ranks would wait for it.
        """
        self._check_equal(sorted(cache_hook.dbdict or ()))
        super().set_cache_hook(cache_hook)

    def _check_equal(self, requests: Sequence[object]) -> None:
        """Raise UserError unless requests, or keys of caches, are the same on every rank."""
        digests = Ranks.of(self.ctx).all_gather(digest_bytes(repr(requests).encode()))
        if len(set(digests)) > 1:
            raise UserError("the ranks have different requests; delete the caches of --use_cache")

    def _scores(self, requests: Sequence[Request], disable_tqdm: bool) -> list[Score]:
        self._check_equal([[request.first, *request.tokens.tolist()] for request in requests])
        disable_tqdm |= not self.ctx.is_main
        with tqdm(total=len(requests), desc="Running loglikelihood requests", disable=disable_tqdm) as bar:
            return score(self.trained, requests, batch_size=self.batch_size, ctx=self.ctx, advance=bar.update)

    def loglikelihood_rolling(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[float]:
        """Return log-likelihoods of full texts in nats, each token scored once, in windows of max_length."""
        windows = [
            list(rolling_windows(self.tok_encode(request.args[0]), self.prefix_token_id, self.max_length))
            for request in requests
        ]
        scores = iter(self._scores([window for text in windows for window in text], disable_tqdm))
        sums = [sum((-next(scores).loss for _ in text), 0.0) for text in windows]
        for request, value in zip(requests, sums, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, value)
        return sums

    def generate_until(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[str]:
        """Return the continuation of each context, up to the first of the task's stops."""
        texts, disable_tqdm = [""] * len(requests), disable_tqdm or not self.ctx.is_main
        # Before the first group: a rank with fewer groups would miss later checks.
        self._check_equal([request.args for request in requests])
        by_arguments: dict[str, list[int]] = {}
        for number, request in enumerate(requests):
            by_arguments.setdefault(repr(request.args[1]), []).append(number)
        with tqdm(total=len(requests), desc="Running generate_until requests", disable=disable_tqdm) as bar:
            for numbers in by_arguments.values():
                options, stops = self._options(requests[numbers[0]].args[1])
                room = self.max_length - options.max_new_tokens
                contexts = (self.tok_encode(requests[number].args[0]) for number in numbers)
                prompts = [tokens[-room:] or [self.prefix_token_id] for tokens in contexts]
                continued = generate(
                    self.trained,
                    prompts,
                    options,
                    ctx=self.ctx,
                    end_ids=self.tokenizer.end_ids,
                    until=stop_check(self.tokenizer, stops),
                    advance=bar.update,
                )
                for number, new in zip(numbers, continued, strict=True):
                    texts[number] = postprocess_generated_text(self.tokenizer.decode(new), stops, None)
                    self.cache_hook.add_partial("generate_until", requests[number].args, texts[number])
        return texts

    def _options(self, arguments: dict[str, Any]) -> tuple[Sampling, list[str]]:
        """Return the sampling settings and the texts that end a continuation. Raises UserError."""
        arguments = dict(normalize_gen_kwargs(arguments, self.settings.max_gen_toks))
        stops = handle_stop_sequences(arguments.pop("until"), eos=self.tokenizer.decode([self.eot_token_id]))
        length = arguments.pop("max_gen_toks")
        if not 1 <= length < self.max_length:
            problem = f"max_gen_toks={length}: use 1 to {self.max_length - 1}"
            raise UserError(f"{problem}, below the model's context length")
        values: dict[str, Any] = declared_sampling(self.tokenizer.declared.generation)
        values |= {"temperature": 1.0, "top_k": 0, "top_p": 1.0}
        values |= {name: arguments.pop(name) for name in DECLARED if name in arguments}
        if not arguments.pop("do_sample"):
            values["temperature"] = 0.0
        options = Sampling(
            max_new_tokens=length, seed=self.settings.seed, batch_size=self.batch_size, **values
        )
        if problems := options.problems():
            raise ConfigError(problems)
        # settings of tasks for `transformers` that are mlm's only behaviour
        ignored = {"num_beams": 1, "use_cache": True, "num_return_sequences": 1}
        if unknown := {key: value for key, value in arguments.items() if ignored.get(key) != value}:
            raise UserError(f"generation arguments {unknown}: not supported; leave them out")
        return options, [stop for stop in stops if stop]


def settings(arguments: dict[str, Any]) -> tuple[LmEvalConfig, Source]:
    """Return settings from model_args and lm-eval's flags, and the model's source.

    Raises ConfigError with all problems.
    """
    keys = {"precision": "precision.dtype", "device": "dist.device"}
    values = {keys.get(key, key): value for key, value in arguments.items() if key != "max_batch_size"}
    if str(values.get("batch_size", "")).startswith("auto"):  # lm-eval's word for as much as fits
        del values["batch_size"]
    elif isinstance(size := values.get("batch_size"), str) and size.isdecimal():
        values["batch_size"] = int(size)
    if isinstance(device := values.get("dist.device"), str):
        kind, _, index = device.partition(":")
        if index not in ("", "0"):
            raise UserError(
                f"device={device}: the first visible device is taken; use device={kind} with "
                f"CUDA_VISIBLE_DEVICES={index}"
            )
        # lm-eval's command passes cuda:0 by default, with or without a GPU
        values["dist.device"] = "auto" if device == "cuda:0" else kind
    position = read_rank_position(os.environ)
    world_size = 1 if position is None else position.world_size
    if position is not None and position.local_world_size < world_size:
        raise UserError(f"WORLD_SIZE={world_size}: lm-eval runs on the ranks of one host; start them there")

    def check(config: LmEvalConfig) -> Sequence[str]:
        facts = launch_facts(config.dist)
        return check_settings(config, world_size=world_size, local_devices=facts.local_devices)

    config = build(LmEvalConfig, values, check)
    return config, open_predictor(config.ckpt, config.parallel)
