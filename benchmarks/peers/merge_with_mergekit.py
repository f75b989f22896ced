"""What `mergekit-yaml` does for a model with an adapter: python merge_with_mergekit.py BASE ADAPTER OUTPUT"""

import sys
from pathlib import Path

from mergekit.config import MergeConfiguration
from mergekit.merge import run_merge
from mergekit.options import MergeOptions

if __name__ == "__main__":
    base, adapter, output = sys.argv[1:]
    merge = MergeConfiguration.model_validate(
        {"merge_method": "passthrough", "dtype": "bfloat16", "models": [{"model": f"{base}+{adapter}"}]}
    )
    # it needs a directory for the model merged by PEFT, which it then reads and writes again
    options = MergeOptions(lora_merge_cache=str(Path(output, "cache")), copy_tokenizer=False)
    run_merge(merge, output, options)
