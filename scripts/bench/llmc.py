"""llm.c as a contender: its training of GPT-2 in C, called step by step as a library."""

import ctypes
import os
import subprocess
import tempfile
from ctypes import POINTER, c_float, c_int, c_size_t, c_void_p
from pathlib import Path

import torch
from torch import Tensor

from bench.contenders import Trainee, in_our_names
from bench.shapes import OPTIMIZER, TRANSPOSED, gpt2_state, make_batches
from bench.spec import Spec
from mlm.util.errors import UserError


class Gpt2(ctypes.Structure):
    """`GPT2` of train_gpt2.c."""

    _fields_ = [
        ("config", c_int * 6),
        ("params", c_void_p * 16),
        ("param_sizes", c_size_t * 16),
        ("params_memory", POINTER(c_float)),
        ("num_parameters", c_size_t),
        ("grads", c_void_p * 16),
        ("grads_memory", POINTER(c_float)),
        ("moments_and_activations", c_void_p * (2 + 3 * 23 + 3)),
        ("batch", c_int * 2),
        ("tokens", c_void_p * 2),
        ("mean_loss", c_float),
    ]


class LlmcTrainee(Trainee):
    """llm.c's train_gpt2.c, or a fork's, as a library built with the flags of its Makefile."""

    notes = (
        "AdamW on one thread, which decays every parameter; without clipping; "
        "activations and gradients stay allocated, so that its memory does not compare",
    )

    def __init__(self, name: str, spec: Spec, device: torch.device) -> None:
        super().__init__(name, spec, device)
        shape = spec.shape
        state = gpt2_state(shape, spec.seed)
        self.weights = {name: as_linear(name, state[name]) for name in parameter_names(shape.num_layers)}
        self.steps, self.model = 0, Gpt2()
        self.batches = [tuple(t.int() for t in both) for both in make_batches(shape, spec.seed)]
        header = [20240326, 3, shape.seq_length, shape.vocab_size, shape.num_layers, shape.num_heads]
        header += [shape.hidden_size, shape.vocab_size] + [0] * 248
        with tempfile.TemporaryDirectory(prefix="bench-train-") as folder:
            self.library = build_library(Path(spec.peers["llmc"]), Path(folder))
            self.library.omp_set_num_threads(spec.threads)
            flat = torch.cat([weight.reshape(-1) for weight in self.weights.values()])
            file = Path(folder, "model.bin")
            file.write_bytes(torch.tensor(header).int().numpy().tobytes() + flat.numpy().tobytes())
            self.library.gpt2_build_from_checkpoint(ctypes.byref(self.model), os.fsencode(file))

    def compute_gradients(self, index: int) -> None:
        """Forward, zero_grad and backward, in the order of its main."""
        tokens, labels = (c_void_p(t.data_ptr()) for t in self.batches[index % len(self.batches)])
        model, sizes = ctypes.byref(self.model), map(c_size_t, self.batches[0][0].shape)
        self.library.gpt2_forward(model, tokens, labels, *sizes)
        self.library.gpt2_zero_grad(model)
        self.library.gpt2_backward(model)

    def step(self, index: int) -> None:
        self.compute_gradients(index)
        self.steps, o = self.steps + 1, OPTIMIZER
        settings = map(c_float, (o.lr, *o.betas, o.eps, o.weight_decay))
        self.library.gpt2_update(ctypes.byref(self.model), *settings, self.steps)

    def loss_and_gradients(self) -> tuple[float, dict[str, Tensor]]:
        self.compute_gradients(0)
        array = ctypes.cast(self.model.grads_memory, POINTER(c_float * self.model.num_parameters)).contents
        sizes = [weight.numel() for weight in self.weights.values()]
        parts = torch.frombuffer(array, dtype=torch.float32).clone().split(sizes)
        gradients = {
            name: as_linear(name, part.view(weight.shape))
            for (name, weight), part in zip(self.weights.items(), parts, strict=True)
        }
        return self.model.mean_loss, in_our_names(gradients, self.spec.shape)

    def clear(self) -> None:
        """Nothing: it keeps the memory of gradients."""


def as_linear(name: str, tensor: Tensor) -> Tensor:
    """A weight of `transformers` as nn.Linear stores it, and back."""
    return tensor.t().contiguous() if name.endswith(TRANSPOSED) else tensor


def parameter_names(num_layers: int) -> list[str]:
    """Names of `transformers` in the order of its ParameterTensors: each kind for all layers."""
    parts = ("ln_1", "attn.c_attn", "attn.c_proj", "ln_2", "mlp.c_fc", "mlp.c_proj")
    kinds = [f"{part}.{kind}" for part in parts for kind in ("weight", "bias")]
    layers = [f"h.{n}.{kind}" for kind in kinds for n in range(num_layers)]
    names = ["wte.weight", "wpe.weight", *layers, "ln_f.weight", "ln_f.bias"]
    return [f"transformer.{name}" for name in names]


def build_library(checkout: Path, folder: Path) -> ctypes.CDLL:
    """Compile train_gpt2.c without its main, its messages to stdout left out. Raises UserError."""
    quiet, library = folder / "quiet.h", folder / "llmc.so"
    quiet.write_text("#include <stdio.h>\n#define printf(...) ((void)0)\n")
    flags = ["-Ofast", "-march=native", "-fopenmp", "-DOMP", "-DTESTING", "-shared", "-fPIC", "-w"]
    command = [
        os.environ.get("CC", "cc"),
        *flags,
        "-include",
        quiet,
        checkout / "train_gpt2.c",
        "-o",
        library,
    ]
    try:
        subprocess.run([*command, "-lm"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        reason = (getattr(error, "stderr", "") or str(error)).strip().splitlines()[0]
        raise UserError(f"--contenders llmc: train_gpt2.c does not compile; set CC ({reason})") from None
    return ctypes.CDLL(str(library))
