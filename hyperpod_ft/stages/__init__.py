"""The programs that jobs run, one per stage; what does the work is in other packages:

env (environments/), download (download/), dataset (data/), precompile and train (engines/, around them job/),
consolidate and merge (checkpoint/), generate, tasks and eval (evaluation/).
"""
