"""Hydra's loader of configurations, with what a recipe offers and what it does not."""

import re

from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.object_type import ObjectType
from hydra.types import RunMode
from omegaconf import DictConfig

from conf.closed import ConfigError, nearest

__all__ = ["Loader", "is_schema"]

_NULL = re.compile(r"(?P<group>[\w/-]+)=\s*null\s*")


class Loader(ConfigLoaderImpl):
    """As Hydra's, except for two things.

    The option classes of `conf.store` are no options: neither TAB completion nor --help shows them. And `group=null` is
    accepted where null is the group's default, as in `experiment=null`, which Hydra refuses.
    """

    def load_configuration(
        self,
        config_name: str | None,
        overrides: list[str],
        run_mode: RunMode,
        from_shell: bool = True,
        validate_sweep_overrides: bool = True,
    ) -> DictConfig:
        """Compose.

        Raises:
            ConfigError: A group that is not empty by default is set to null.
        """
        nulls = {line: self._group_set_to_null(line) for line in overrides}
        cfg = super().load_configuration(
            config_name,
            [line for line in overrides if nulls[line] is None],
            run_mode,
            from_shell,
            validate_sweep_overrides,
        )
        for line, group in nulls.items():
            if group is not None and cfg.hydra.runtime.choices.get(group, "") is not None:
                raise ConfigError(f"{line}: {self.offered(group)}; leave {group} out for its default")
        if any(nulls.values()):  # a saved run and a sweep's job say what was given
            of_hydra = set(cfg.hydra.overrides.hydra)
            cfg.hydra.overrides.task = [line for line in overrides if line not in of_hydra]
        return cfg

    def get_group_options(
        self,
        group_name: str,
        results_filter: ObjectType | None = ObjectType.CONFIG,
        config_name: str | None = None,
        overrides: list[str] | None = None,
    ) -> list[str]:
        """Names of a group's options, without the internal ones."""
        options = super().get_group_options(group_name, results_filter, config_name, overrides)
        return [option for option in options if not is_schema(option)]

    def list_groups(self, parent_name: str) -> list[str]:
        """Names of the groups below a group, without the values that come with a model by themselves."""
        return [group for group in super().list_groups(parent_name) if not group.startswith("tuned")]

    def groups(self) -> list[str]:
        """Names of the recipe's groups, without Hydra's own."""
        return [group for group in self.list_groups("") if group != "hydra"]

    def offered(self, group: str) -> str:
        """The options of a group in words."""
        return f"the options of {group} are {', '.join(self.get_group_options(group))}"

    def no_option(self, group: str, option: str) -> str:
        """The message for an option that a group does not have."""
        near = nearest(option, self.get_group_options(group))
        return f"{group} has no option {option}{f', did you mean {near}?' if near else ''}; {self.offered(group)}"

    def _group_set_to_null(self, line: str) -> str | None:
        found = _NULL.fullmatch(line)
        return found["group"] if found and self.repository.group_exists(found["group"]) else None


def is_schema(option: str) -> bool:
    """Whether this is one of the option classes of `conf.store`, which only a file's defaults list refers to."""
    return option.endswith("_schema")
