"""Run first by every Python process on fake GPUs that compute: replaces the operators of CUDA."""

import importlib.abc
import importlib.machinery
import os
import sys
from types import ModuleType


class AfterTorch(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds torch as Python does, and does something more when it was loaded."""

    def find_spec(self, name, path=None, target=None):  # type: ignore[no-untyped-def]
        if name != "torch":
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is not None:
            self.loader, spec.loader = spec.loader, self
        return spec

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)  # type: ignore[no-any-return, union-attr]

    def exec_module(self, module: ModuleType) -> None:
        sys.meta_path.remove(self)  # only now: who asks where torch is may not load it
        module.__spec__.loader = self.loader  # type: ignore[union-attr]
        self.loader.exec_module(module)  # type: ignore[union-attr]
        import torch.utils._triton
        from gpu.fake.arithmetic import install

        install()
        torch.utils._triton.has_triton = lambda: False  # compiled kernels would compute nothing


if os.environ.get("MLM_FAKE_GPU_ARITHMETIC") == "1":
    sys.meta_path.insert(0, AfterTorch())
