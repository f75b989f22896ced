"""What `axolotl merge-lora` calls, shard by shard: python merge_with_axolotl.py BASE ADAPTER OUTPUT"""

import sys

from axolotl.cli.utils.lora_merge import merge_lora_sharded_efficient

if __name__ == "__main__":
    base, adapter, output = sys.argv[1:]
    merge_lora_sharded_efficient(base, adapter, output)
