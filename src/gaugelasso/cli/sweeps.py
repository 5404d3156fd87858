"""The command that trains many models, and writes what came of them."""

import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from gaugelasso.cli.arguments import (
    Changes,
    ConfigPath,
    Device,
    Out,
    Overwrite,
    Resume,
    choose_existing,
    load_settings,
)
from gaugelasso.cli.output import console, say
from gaugelasso.errors import UserError
from gaugelasso.report import write_comparison, write_report
from gaugelasso.report.arms import arms_table
from gaugelasso.report.data import Condition, load_condition, load_run
from gaugelasso.report.layout import render, to_markdown
from gaugelasso.report.results import collect_arms, collect_results, results_table
from gaugelasso.runs.writing import make_folder, write_json
from gaugelasso.sweeps.arms import Arm, ArmOutcome, failures_message, parse_arms, parse_seeds
from gaugelasso.sweeps.cluster import Cluster, parse_settings
from gaugelasso.sweeps.sweep import Plan, run_sweep
from gaugelasso.training.evaluation import choose_device


def sweep(
    config: ConfigPath,
    seeds: Annotated[str, typer.Option(help="Seeds, as in 42-46 or 1,5,9.")] = "42-46",
    jobs: Annotated[int, typer.Option(min=1, help="Runs side by side.")] = 1,
    arm: Annotated[
        list[str] | None,
        typer.Option(
            metavar="'NAME: KEY=VALUE ...'",
            help="A condition to compare: what it changes on top of --set, or nothing. Repeat "
            "it for more; all seeds of all arms share --jobs.",
        ),
    ] = None,
    set_: Changes = None,
    out: Out = None,
    device: Device = None,
    resume: Resume = False,
    overwrite: Overwrite = False,
    results: Annotated[
        Path | None, typer.Option(help="Also write the results file (JSON) here.")
    ] = None,
    cluster: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Hand the runs to a cluster through submitit: slurm, or local to try it. Jobs go "
            "on when this command is broken off; given again with --resume, it finds them, waits "
            "for those that have not ended, and collects all.",
        ),
    ] = None,
    cluster_set: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=VALUE",
            help="A setting of submitit: timeout_min=240, gpus_per_node=1, slurm_partition=gpu.",
        ),
    ] = None,
) -> None:
    """Train several seeds, processes side by side; one failure does not stop the rest.

    Example: gaugelasso sweep configs/retrieval/main.toml --seeds 42-46 --jobs 5

    Example: gaugelasso sweep demo.toml --arm "baseline:" --arm "wide trust: compress.trust=4"

    Example: gaugelasso sweep demo.toml --jobs 20 --cluster slurm --cluster-set timeout_min=240
    """
    existing = choose_existing(resume, overwrite)
    folder = out or Path("runs") / config.stem
    arms = parse_arms(arm or [], folder)
    numbers, changes = parse_seeds(seeds), set_ or []
    devices = _check_settings(config, changes, arms, device, here=cluster is None)
    if results is not None:
        make_folder(results.parent)
    home = _open_cluster(cluster, cluster_set or [], folder, overwrite)
    on_gpu = home is None and any(choose_device(one).startswith("cuda") for one in devices)
    plan = Plan(config, numbers, arms, jobs, changes, device, existing, on_gpu)
    outcomes = run_sweep(plan, console, home)
    for outcome in outcomes:
        _leave_out_damaged(outcome)
    ended = [outcome for outcome in outcomes if outcome.ended]
    if arm and ended:
        _write_arms(ended, len(numbers), folder, results)
    elif ended:
        _write_only(ended[0], config.stem, results)
    if failures := failures_message(outcomes, len(numbers)):
        raise UserError(failures)


def _check_settings(
    config: Path, changes: list[str], arms: list[Arm], device: str | None, here: bool
) -> set[str]:
    """The devices that the arms name; UserError where the settings of one are wrong."""
    load_settings(config, changes, device, here)  # what is wrong with all is no arm's fault
    devices = set()
    for arm in arms:
        try:
            settings = load_settings(config, [*changes, *arm.changes], device, here)
        except UserError as error:
            raise UserError(f"--arm {arm.name!r}: {error}") from None
        devices.add(settings.train.device)
    return devices


def _open_cluster(
    name: str | None, settings: list[str], folder: Path, overwrite: bool
) -> Cluster | None:
    if name is None:
        if settings:
            raise UserError(f"--cluster-set {settings[0]}: for use with --cluster")
        return None
    if overwrite:
        raise UserError("--overwrite with --cluster: a job that queues again would lose its run")
    return Cluster(name, parse_settings(settings), folder)


def _leave_out_damaged(outcome: ArmOutcome) -> None:
    """Count a run whose files cannot be read as failed, so that the others have results."""
    for seed in list(outcome.ended):
        try:
            load_run(outcome.arm.run_folder(seed))
        except UserError as error:
            say(f"warning: {outcome.arm.label(seed)}: {error}; it is left out of the results")
            outcome.ended.remove(seed)
            if seed not in outcome.failed:
                outcome.failed.append(seed)


def _write_only(outcome: ArmOutcome, name: str, results: Path | None) -> None:
    """What came of a sweep that compares nothing."""
    collected = _write_results(outcome)
    if results is not None:
        write_json(results, collected)
    say(results_table(collected, name))
    say(f"report: {write_report(outcome.folders, outcome.arm.folder / 'report').page}")


def _write_results(outcome: ArmOutcome) -> dict[str, Any]:
    """The results file of one arm, in its folder."""
    collected = collect_results(outcome.folders) | {"command": _command()}
    write_json(outcome.arm.folder / "results.json", collected)
    return collected


def _write_arms(ended: list[ArmOutcome], seeds: int, folder: Path, results: Path | None) -> None:
    """Results first, of each arm and of all, then what is drawn of them."""
    for outcome in ended:
        _write_results(outcome)
    conditions = [
        Condition(one.arm.name, one.arm.changes, load_condition(one.folders), seeds)
        for one in ended
    ]
    collected = collect_arms(conditions) | {"command": _command()}
    for path in filter(None, (folder / "results.json", results)):
        write_json(path, collected)
    table = arms_table(conditions, collected)
    write_comparison(conditions, table, folder)
    for outcome in ended:
        page = write_report(outcome.folders, outcome.arm.folder / "report").page
        say(f"report of {outcome.arm.name}: {page}")
    if console.is_terminal:
        render(table, console)
    else:  # a log has no width that a table could be fitted to
        say(to_markdown(table))
    say(f"comparison: {folder / 'arms.md'}, {folder / 'arms.png'}")


def _command() -> str:
    """The sweep's own command, where its runs know theirs alone."""
    return shlex.join(["gaugelasso", *sys.argv[1:]])
