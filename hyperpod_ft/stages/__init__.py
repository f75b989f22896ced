"""The programs that jobs run, one per stage, each thin: what does the work is in the package named after it.

env (environments/), download (download/), dataset (data/), precompile and train (engines/, around them job/),
consolidate and merge (checkpoint/), generate, tasks and eval (evaluation/).
"""
