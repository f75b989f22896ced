"""PEFT's merge in bfloat16: python merge_with_peft.py BASE ADAPTER OUTPUT"""

import sys

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

if __name__ == "__main__":
    base, adapter, output = sys.argv[1:]
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16)
    PeftModel.from_pretrained(model, adapter).merge_and_unload().save_pretrained(output)
