import yaml


def load_yaml(path, *, resolve_func, recursive):
    return yaml.safe_load(path.read_text())
