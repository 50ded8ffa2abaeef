"""Models of transformers split by their own plans (`tp_plan="auto"`), as subjects of `mlm audit`."""

import os
import tempfile
from functools import partial

import torch
import torch.nn.functional as F
import transformers
from healthy import HEADS, HIDDEN, VOCAB, samples

from mlm import AuditSubject

os.environ["TQDM_DISABLE"] = "1"
KINDS = ("llama", "qwen3", "mistral", "qwen3_moe")
SIZES = {"hidden_size": HIDDEN, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": VOCAB}
SIZES |= {"num_attention_heads": HEADS, "num_key_value_heads": 2, "head_dim": 8}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True}
FOLDER = tempfile.TemporaryDirectory()  # of the process that imports this; its ranks read it
for kind in KINDS:
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **SIZES, **(EXPERTS if kind.endswith("moe") else {}))
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float64)
    model.save_pretrained(os.path.join(FOLDER.name, kind))


def build(mesh, kind: str) -> AuditSubject:
    split = {"tp_plan": "auto", "device_mesh": mesh["tp"]} if mesh["tp"].size() > 1 else {}
    folder = os.path.join(FOLDER.name, kind)
    dtype = torch.get_default_dtype()  # float32 for mixtures, whose grouped products have no float64
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **split).train()
    tokens, labels = samples(mesh)
    return AuditSubject(
        module=model,
        batch={"input_ids": tokens, "use_cache": False},
        loss=lambda output: F.cross_entropy(output.logits.flatten(0, 1), labels.flatten()),
    )


llama, qwen3, mistral, qwen3_moe = (partial(build, kind=kind) for kind in KINDS)
