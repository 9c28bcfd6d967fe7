"""From the command line to a checked configuration, before anything is written or torch is imported.

Hydra parses and composes; this module decides what may be written and turns every refusal into one `ConfigError` that
names the key, what is accepted and the nearest valid name.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, NoReturn

from hydra import version
from hydra._internal.callbacks import Callbacks
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra._internal.hydra import Hydra
from hydra._internal.utils import create_automatic_config_search_path, get_args_parser
from hydra.core.config_search_path import ConfigSearchPath, SearchPathQuery
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType
from hydra.core.utils import run_job
from hydra.errors import OverrideParseException
from hydra.types import HydraContext, RunMode
from omegaconf import DictConfig, OmegaConf, open_dict, read_write
from omegaconf.errors import OmegaConfBaseException

from conf.closed import ConfigError, describe_error, field_keys, to_config, unknown_key
from recipes.runtime.loader import Loader, is_schema
from recipes.runtime.translate import translated

__all__ = ["CommandLine", "Composed"]

# What tells the options of a group apart; a key of its own would contradict the option's name.
_SET_BY_OPTION = {
    "collate": "layout",
    "attention": "scope",
    "positions": "axes",
    "scheduler": "name",
    "logger": "name",
    "advantage": "name",
}


@dataclass
class Composed:
    """A configuration that passed every check.

    Attributes:
        config: The recipe's dataclass.
        cfg: What Hydra composed, its own node included.
        run_dir: `hydra.run.dir`, absolute, interpolations resolved.
    """

    config: Any
    cfg: DictConfig
    run_dir: Path


class CommandLine:
    """One invocation of a recipe.

    Args:
        name: The recipe, which is also the name of its primary configuration.
        argv: Arguments without the program's name. Flags and overrides may be mixed in any order.

    Raises:
        ConfigError: A flag or an override is malformed, or asks for what is not offered.
    """

    def __init__(self, name: str, argv: Sequence[str]):
        version.setbase("1.3")
        self.parser = get_args_parser()
        self.parser.error = _refuse  # type: ignore[method-assign]  # argparse would print its usage and exit
        self.args = self.parser.parse_intermixed_args(list(argv))
        self.name = self.args.config_name or name
        if self.args.config_path is not None:
            raise ConfigError("--config-path is not offered: add files of your own with --config-dir=<folder>")
        if self.args.experimental_rerun is not None:
            raise ConfigError(
                "--experimental-rerun is not offered: give the lines of .hydra/overrides.yaml as overrides"
            )
        shows = [self.args.cfg, self.args.info, self.args.shell_completion, self.args.multirun, self.args.run]
        if sum(bool(flag) for flag in shows) > 1:
            raise ConfigError("only one of --run, --multirun, --cfg, --info and --shell-completion can be given")
        if self.args.resolve and not (self.args.cfg or self.args.help):
            raise ConfigError("--resolve belongs to --cfg")
        if self.args.package and not self.args.cfg:
            raise ConfigError("--package belongs to --cfg")
        if is_schema(self.name):
            raise ConfigError(f"--config-name={self.name} is for the defaults list of a file; it cannot be run itself")
        self.loader = Loader(self._search_path())
        self.hydra = self._open(name)

    @property
    def shows_only(self) -> bool:
        """Whether the flags ask to print something and run nothing."""
        args = self.args
        return bool(args.help or args.hydra_help or args.cfg or args.info or args.shell_completion)

    def show(self) -> None:
        """Print what the flags ask for.

        Raises:
            ConfigError: What would be shown is wrong.
        """
        args, overrides = self.args, self.args.overrides
        if args.hydra_help:
            self.hydra.hydra_help(config_name=self.name, args_parser=self.parser, args=args)
        elif args.shell_completion:
            translated(lambda: self.hydra.shell_completion(self.name, overrides))
        else:
            composed = self.compose(overrides)
            if args.help:
                self.hydra.app_help(config_name=self.name, args_parser=self.parser, args=args)
            elif args.info:
                self.hydra.show_info(args.info, config_name=self.name, overrides=overrides)
            elif args.cfg == "job" and not args.package and not args.resolve:
                sys.stdout.write(OmegaConf.to_yaml(_without_hydra(composed.cfg)))  # spares a second composition
            elif args.package in (None, "_global_") or self._package(composed.cfg) is not None:
                translated(
                    lambda: self.hydra.show_cfg(self.name, overrides, args.cfg, args.package, resolve=args.resolve)
                )
            else:
                print("null")

    def compose(self, overrides: Sequence[str]) -> Composed:
        """Compose one run's configuration and check all of it.

        Args:
            overrides: `key=value` strings without sweeps.

        Raises:
            ConfigError: Naming the first thing that is wrong.
        """
        parsed = self._parse(overrides)
        self._check_prefixes(parsed, RunMode.RUN)
        cfg = self._compose(overrides, RunMode.RUN)
        self._check_optional_groups(parsed, cfg)
        self._check_choices(cfg)
        _check_hydra(cfg.hydra)
        return self._typed(cfg)

    def is_sweep(self) -> bool:
        """Whether the flags and overrides ask for a sweep.

        Raises:
            ConfigError: An override is malformed.
        """
        if self.args.multirun:
            return True
        parsed = self._parse(self.args.overrides)
        if not any(override.is_sweep_override() or override.key_or_group == "hydra.mode" for override in parsed):
            return False
        return bool(translated(lambda: self.hydra.get_mode(self.name, self.args.overrides)) == RunMode.MULTIRUN)

    def start(self, composed: Composed, config_subdir: str | None, task: Callable[[DictConfig], None]) -> None:
        """Let Hydra set up logging, save the configuration in the run folder, and call `task`.

        Args:
            composed: The configuration of this run.
            config_subdir: Where it is saved, relative to the run folder; None saves nothing.
            task: Called with the configuration, without Hydra's node.

        Raises:
            Exception: Whatever `task` raises.
        """
        cfg = composed.cfg
        with read_write(cfg.hydra):
            cfg.hydra.mode = RunMode.RUN
            cfg.hydra.output_subdir = config_subdir
        callbacks = Callbacks(cfg)
        callbacks.on_run_start(config=cfg, config_name=self.name)
        context = HydraContext(config_loader=self.loader, callbacks=callbacks)
        ended = run_job(task, cfg, "hydra.run.dir", None, context)
        callbacks.on_run_end(config=cfg, config_name=self.name, job_return=ended)
        _ = ended.return_value  # raises what the task raised

    def check_sweep(self) -> None:
        """Check every job of a sweep before the first one runs.

        With Hydra's basic sweeper the jobs are known beforehand. Another sweeper draws them one by one, and each is
        then checked as it starts.

        Raises:
            ConfigError: Naming the job's overrides where one of several is wrong.
        """
        overrides = [*self.args.overrides, "hydra.mode=MULTIRUN"]
        parsed = self._parse(overrides)
        self._check_prefixes(parsed, RunMode.MULTIRUN)
        hydra: DictConfig = self._compose(overrides, RunMode.MULTIRUN).hydra
        _check_hydra(hydra)
        if not str(hydra.sweeper._target_).endswith(".BasicSweeper"):
            return
        params = [f"{key}={value}" for key, value in (hydra.sweeper.params or {}).items()]
        task = [override for override in parsed if not override.is_hydra_override()]
        fixed = [str(o.input_line) for o in parsed if o.is_hydra_override() and o.key_or_group != "hydra.mode"]
        batches = translated(lambda: BasicSweeper.split_arguments(self._parse(params) + task, None))
        for job in batches[0]:
            try:
                self.compose([*fixed, *job, "hydra.mode=RUN"])
            except ConfigError as error:
                swept = f" (job {' '.join(job)})" if len(batches[0]) > 1 else ""
                raise ConfigError(f"{error}{swept}") from error

    def _search_path(self) -> ConfigSearchPath:
        search_path = create_automatic_config_search_path(None, None, "pkg://conf")
        if self.args.config_dir is not None:
            folder = Path(self.args.config_dir).absolute()
            if not folder.is_dir():
                raise ConfigError(f"--config-dir={self.args.config_dir}: {folder} is not a folder")
            search_path.prepend("command-line", f"file://{folder}", anchor=SearchPathQuery(provider="schema"))
        return search_path

    def _open(self, name: str) -> Hydra:
        GlobalHydra.instance().clear()
        hydra = Hydra(task_name=name, config_loader=self.loader)
        GlobalHydra.instance().initialize(hydra)
        return hydra

    def _parse(self, overrides: Sequence[str]) -> list[Override]:
        parser = OverridesParser.create(config_loader=self.loader)
        parsed = []
        for override in overrides:
            try:
                parsed += parser.parse_overrides([override])
            except OverrideParseException as error:
                raise ConfigError(
                    f"malformed override {override!r}: accepted are key=value and group=option; a value with spaces or "
                    f"special characters wants quotes, 'key=\"a b\"' ({str(error.__cause__ or error).splitlines()[0]})"
                ) from error
            if not parsed[-1].key_or_group:
                raise ConfigError(f"malformed override {override!r}: accepted are key=value and group=option")
        return parsed

    def _check_prefixes(self, overrides: Sequence[Override], mode: RunMode) -> None:
        """Refuse `+key`, `++key` and `~key`, several values outside a sweep, and a group set to what is no option."""
        groups = self.loader.groups()
        for override in overrides:
            key, line = override.key_or_group, override.input_line
            if override.is_sweep_override():
                if mode == RunMode.RUN:
                    raise ConfigError(
                        f"{line} has several values: sweep over them with -m, or write one value, a list as "
                        f"{key}=[a,b] and a text with a comma as '{key}=\"a,b\"'"
                    )
            elif (
                key in groups
                and not override.is_delete()
                and not isinstance(override.value(), str | list | dict | None)
            ):
                raise ConfigError(f"{line}: {self.loader.offered(key)}; leave {key} out for its default")
            elif key in groups and isinstance(options := override.value(), list):
                for option in options:
                    if is_schema(str(option)):
                        raise ConfigError(self.loader.no_option(key, str(option)))
        prefixed = [o for o in overrides if o.type != OverrideType.CHANGE]
        if not prefixed:
            return
        plain = [str(o.input_line) for o in overrides if o not in prefixed]
        cfg = self._compose(plain, mode)
        for override in prefixed:
            key, line = override.key_or_group, str(override.input_line)
            if override.is_hydra_override():
                groups = [f"hydra/{group}" for group in self.loader.list_groups("hydra")]
                known = ["hydra", *field_keys(cfg.hydra, "hydra.")]
            else:
                groups, known = self.loader.groups(), list(field_keys(_without_hydra(cfg)))
            if key not in (*groups, *known) and key.partition(".")[0] != "extras":
                raise ConfigError(unknown_key(key, known, groups))
            if override.is_delete():
                raise ConfigError(f"{line}: an option cannot be removed; give it another value, {key}=<value>")
            plain_line = f"{key}={line.partition('=')[2]}"  # without a package, group@package=option
            raise ConfigError(f"{line}: keys are never added; write {plain_line}")

    def _check_choices(self, cfg: DictConfig) -> None:
        """Refuse the internal `*_schema` options, and a key that contradicts the option which sets it."""
        repository = self.loader.repository
        for group, chosen in cfg.hydra.runtime.choices.items():
            if isinstance(chosen, str) and is_schema(chosen):
                raise ConfigError(self.loader.no_option(group, chosen))
            loaded = repository.load_config(f"{group}/{chosen}") if group in _SET_BY_OPTION else None
            if loaded is None or OmegaConf.is_missing(cfg[group], _SET_BY_OPTION[group]):
                continue
            key = f"{group}.{_SET_BY_OPTION[group]}"
            of_option = OmegaConf.select(loaded.config, _SET_BY_OPTION[group])
            value = OmegaConf.select(cfg, key, throw_on_resolution_failure=False)
            value = value.name if isinstance(value, Enum) else value
            if of_option is not None and value not in (None, of_option):
                raise ConfigError(
                    f"{key}={value}: {group}={chosen} sets it to {of_option}; choose another by {group}=<name>, "
                    f"{self.loader.offered(group)}"
                )

    def _check_optional_groups(self, overrides: Sequence[Override], cfg: DictConfig) -> None:
        """Refuse an unknown option of a group that the defaults list marks `optional`, which Hydra would ignore."""
        repository = self.loader.repository
        if cfg.hydra.searchpath:  # folders that this repository does not know
            return
        for override in overrides:
            group, option = override.key_or_group, override.value()
            is_option = isinstance(option, str) and group != "hydra" and repository.group_exists(group)
            if is_option and not repository.config_exists(f"{group}/{option}"):
                raise ConfigError(self.loader.no_option(group, str(option)))

    def _compose(self, overrides: Sequence[str], mode: RunMode) -> DictConfig:
        return translated(
            lambda: self.hydra.compose_config(
                config_name=self.name, overrides=list(overrides), run_mode=mode, with_log_configuration=False
            ),
            no_option=self.loader.no_option,
            groups=self.loader.groups(),
            overrides=self._parse(overrides),
        )

    def _typed(self, cfg: DictConfig) -> Composed:
        hydra = cfg.hydra
        try:
            run_dir = Path(hydra.run.dir).absolute()
            with read_write(hydra):
                hydra.runtime.output_dir = str(run_dir)
        except OmegaConfBaseException as error:
            raise ConfigError(describe_error(error)) from error
        HydraConfig.instance().set_config(cfg)  # for values that refer to ${hydra:…}
        try:
            config = to_config(_without_hydra(cfg))
        finally:
            HydraConfig.instance().cfg = None
        return Composed(config=config, cfg=cfg, run_dir=run_dir)

    def _package(self, cfg: DictConfig) -> Any:
        """The part of the configuration that --package names."""
        shown = {"job": _without_hydra(cfg), "hydra": OmegaConf.masked_copy(cfg, "hydra"), "all": cfg}[self.args.cfg]
        try:
            part = OmegaConf.select(shown, self.args.package)
        except OmegaConfBaseException as error:
            raise ConfigError(describe_error(error)) from error
        known = list(field_keys(shown))
        if part is None and self.args.package not in known:
            raise ConfigError(f"--package={self.args.package}: {unknown_key(self.args.package, known)}")
        return part


def _check_hydra(hydra: DictConfig) -> None:
    """Refuse what Hydra allows and a run cannot honour."""
    if hydra.job.chdir:
        raise ConfigError(
            "hydra.job.chdir=true: accepted is false; a run stays in the working directory, so that relative paths "
            "mean the same in every run (its own folder is hydra.run.dir)"
        )
    if hydra.output_subdir is None:
        raise ConfigError(
            "hydra.output_subdir=null: accepted is the name of a folder, for example .hydra; every run saves its "
            "configuration"
        )


def _without_hydra(cfg: DictConfig) -> DictConfig:
    task = cfg.copy()
    with read_write(task), open_dict(task):
        del task["hydra"]
    return task


def _refuse(message: str) -> NoReturn:
    raise ConfigError(message)
