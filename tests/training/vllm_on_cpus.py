"""Imported before a training: vLLM keeps its weights on CPUs as they are on GPUs, where TRL updates them.

There it would rearrange them for its own kernels and drop them, so the kit refuses it on CPUs.
"""

import vllm._custom_ops
import vllm.model_executor.layers.utils as kernels

from hyperpod_ft.planning.trl import limits

vllm._custom_ops._supports_onednn = False
kernels.check_cpu_sgl_kernel = lambda *_: False
limits._check_vllm = limits._check_vllm_share = lambda *_: None
