"""From a RunConfig to a Plan, and whether a model fits it: starts no program, and reads only pins and config.json."""
