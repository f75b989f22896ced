"""Set up a node of the cluster in steps, each safe to run again, on many nodes at once, and after a crash.

To write a step: one module of `provision/steps/`, one subclass of `step.Step`, one entry in `steps.STEPS`:

    class Swap(Step):
        name = "swap"              # what --only and the log call it
        needs = ("identify",)      # does not run when one of these failed; --only runs them too
        deadline = 120.0           # seconds for all attempts; then the step and its commands are killed
        attempts = 3               # for temporary errors: PassingError, OSError, a failed command

        def needed(self, node):    # does it apply to this node? (default: yes)
            return node.live and node.identity.role == "compute"

        def missing(self, node):   # what is missing, a line each; [] if nothing is. Changes nothing.
            return [] if "/swapfile" in node.path("/proc/swaps").read_text() else ["no swap"]

        def do(self, node):        # do it. Then `missing` runs again; anything it returns then is a failure.
            node.run("swapon", "/swapfile")

A step that only writes files is a subclass of `files.FilesStep` and returns them. Each attempt runs in a separate
process, so steps share nothing in memory: they read `node.identity` (role, group, addresses) and `node.settings`.

- Paths: `node.path("/etc/x")`, never a bare "/etc/x". With `--root DIR` that is DIR/etc/x, and the running
  machine must not be changed (mounts, modules, sysctl, services): such steps check `node.live`.
- Commands: `node.run("useradd", ...)`; raises PassingError with the command's last line; with `--root`, chrooted there.
- Errors: `NodeError(problem, remedy)` if a person must fix it, `PassingError` if it may be temporary.
- Files: `files.write(...)`, which replaces them atomically, and only if they differ.
- `node.say(text)` writes a line to the log. `apt.install(node, [...])` waits for other package managers.

Only the standard library of Python 3.8 is used.
"""
