"""What is done on a node of the cluster: a row of steps, each safe to run again, on many nodes at once, after a crash.

How a step is written. One module of `provision/steps/`, one subclass of `step.Step`, one entry in `steps.STEPS`:

    class Swap(Step):
        name = "swap"              # what --only and the log call it
        needs = ("identify",)      # does not run when one of these failed; --only runs them too
        deadline = 120.0           # seconds for all its attempts; then it and its commands are killed
        attempts = 3               # for what passes by itself: PassingError, OSError, a command's failure

        def needed(self, node):    # is this a thing of this node? (default: yes)
            return node.live and node.identity.role == "compute"

        def missing(self, node):   # already so? What is not, a line each; [] when all is. Changes nothing.
            return [] if "/swapfile" in node.path("/proc/swaps").read_text() else ["no swap"]

        def do(self, node):        # do it. Afterwards `missing` is asked again; what it still finds is a failure.
            node.run("swapon", "/swapfile")

A step that is files alone is a subclass of `files.FilesStep` and only says which. Each attempt runs in a process of
its own, so a step keeps nothing in memory for another: it asks `node.identity` (role, group, addresses) and
`node.settings`.

- Paths: `node.path("/etc/x")`, never a bare "/etc/x". With `--root DIR` that is DIR/etc/x, and nothing may be done to
  the running machine (mounts, modules, sysctl, services): such steps ask `node.live`.
- Commands: `node.run("useradd", ...)`; raises PassingError with the command's last line; with `--root`, chrooted there.
- Errors: `NodeError(problem, remedy)` for what a person has to mend, `PassingError` for what time may mend.
- Files: `files.write(...)`, which replaces them whole or not at all and leaves them alone when they are so already.
- `node.say(text)` writes a line to the log. `apt.install(node, [...])` waits for other package managers.

Slurm's `Prolog` and `Epilog` are /opt/slurm/etc/scripts/prolog.sh and epilog.sh (step `prolog_epilog`).
Only the standard library of Python 3.8 is used.
"""
