"""A plugin for axolotl, which names it in its YAML file:

    plugins:
      - flashoptim_hf.axolotl.FlashOptimPlugin
    flashoptim: flashoptim_paged_adamw
    flashoptim_args: page_bytes=32MiB          # as optim_args
    learning_rate: 2e-4                        # weight_decay, adam_beta1, adam_beta2, adam_epsilon as usual

axolotl checks `optimizer` against its own list, so that the name stands under a key of its own, and `optimizer` is left as it is. axolotl
need not be installed for this file to be imported: the class has the hooks that axolotl calls, and inherits nothing.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from .errors import ConfigurationError


class FlashOptimArgs(BaseModel):
    """The keys that the plugin adds to axolotl's configuration."""

    flashoptim: str | None = None
    flashoptim_args: str | None = None


class FlashOptimPlugin:
    """Makes the optimizer that `flashoptim` names, from axolotl's usual keys and `flashoptim_args`. Every other hook does nothing."""

    def register(self, cfg: Any) -> None:  # noqa: ARG002
        """Make the names known to transformers, before its argument classes are used."""
        import flashoptim_hf

        flashoptim_hf.register()

    def get_input_args(self) -> str:
        """Where axolotl finds the model of the added keys."""
        return f"{__name__}.{FlashOptimArgs.__name__}"

    def create_optimizer(self, cfg: Any, trainer: Any) -> Any | None:
        """The optimizer over the Trainer's parameter groups; None where `flashoptim` is not set, so that axolotl makes its own.

        Raises:
            ConfigurationError: no such name, or bad `flashoptim_args`.
        """
        from .trainer import register

        name = _get(cfg, "flashoptim")
        if not name:
            return None
        known = register.handlers()
        if name not in known:
            raise ConfigurationError(f"flashoptim={name!r} is not known; choose one of {', '.join(known)}.")
        args = trainer.args
        args.optim_args = _get(cfg, "flashoptim_args") or None
        cls, options = known[name].resolve(args, trainer.model)
        keep = set(trainer.get_decay_parameter_names(trainer.model))
        groups = [
            {
                "params": [p for n, p in trainer.model.named_parameters() if p.requires_grad and (n in keep) is decayed],
                "weight_decay": args.weight_decay if decayed else 0.0,
            }
            for decayed in (True, False)
        ]
        return cls([group for group in groups if group["params"]], **options)

    def __getattr__(self, name: str) -> Any:
        """The hooks that do nothing, in whatever version of axolotl: lists of callbacks are empty, everything else is None."""
        if name.startswith("_"):
            raise AttributeError(name)
        return (lambda *_, **__: []) if name.startswith("add_callbacks") else (lambda *_, **__: None)


def _get(cfg: Any, key: str) -> Any:
    return cfg.get(key) if hasattr(cfg, "get") else getattr(cfg, key, None)
