"""The command sweep: trains several seeds and arms, and writes their results."""

from collections.abc import Sequence
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
from gaugelasso.cli.output import console, print_line
from gaugelasso.errors import UserError
from gaugelasso.report import write_comparison, write_report
from gaugelasso.report.arms import arms_table
from gaugelasso.report.data import Condition, load_condition, load_run
from gaugelasso.report.layout import render, to_markdown
from gaugelasso.report.results import collect_arms, collect_results, results_table
from gaugelasso.runs.command import command
from gaugelasso.runs.reading import exists, read_json
from gaugelasso.runs.writing import make_folder, write_json
from gaugelasso.sweeps.arms import Arm, ArmOutcome, failures_message, parse_arms, parse_seeds
from gaugelasso.sweeps.cluster import Cluster, parse_settings
from gaugelasso.sweeps.sweep import Plan, run_sweep
from gaugelasso.training.evaluation import choose_device
from gaugelasso.training.opening import check_metric
from gaugelasso.training.resume import check_same_config


def sweep(
    config: ConfigPath,
    seeds: Annotated[str, typer.Option(help="Seeds, e.g. 42-46 or 1,5,9.")] = "42-46",
    jobs: Annotated[int, typer.Option(min=1, help="Number of runs at the same time.")] = 1,
    arm: Annotated[
        list[str] | None,
        typer.Option(
            metavar="'NAME: KEY=VALUE ...'",
            help="An arm of a comparison: its name and the keys it changes in addition to --set, "
            "if any. Repeat it for each arm. All seeds of all arms share --jobs.",
        ),
    ] = None,
    set_: Changes = None,
    out: Out = None,
    device: Device = None,
    resume: Resume = False,
    overwrite: Overwrite = False,
    results: Annotated[
        Path | None, typer.Option(help="Also write the results file (JSON) to this path.")
    ] = None,
    cluster: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Submit the runs to a cluster with submitit: slurm, or local for a test. Jobs "
            "continue if this command is interrupted. With --resume it finds them again, waits "
            "for those still running, and collects all results.",
        ),
    ] = None,
    cluster_set: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=VALUE",
            help="A parameter of submitit, e.g. timeout_min=240, gpus_per_node=1 or "
            "slurm_partition=gpu. May be repeated.",
        ),
    ] = None,
) -> None:
    """Train several seeds, each in its own process. A failed run does not stop the others.

    Example: gaugelasso sweep configs/retrieval/main.toml --seeds 42-46 --jobs 5

    Example: gaugelasso sweep demo.toml --arm "baseline:" --arm "wide trust: compress.trust=4"

    Example: gaugelasso sweep demo.toml --jobs 20 --cluster slurm --cluster-set timeout_min=240
    """
    existing = choose_existing(resume, overwrite)
    folder = out or Path("runs") / config.stem
    arms = parse_arms(arm or [], folder)
    numbers, changes = parse_seeds(seeds), set_ or []
    devices = _check_settings(config, changes, arms, device, check_device=cluster is None)
    if existing == "resume":
        _check_resumed(config, changes, arms, numbers, device)
    if results is not None:
        make_folder(results.parent)
    target = _open_cluster(cluster, cluster_set or [], folder, overwrite)
    on_gpu = target is None and any(choose_device(one).startswith("cuda") for one in devices)
    plan = Plan(config, numbers, arms, jobs, changes, device, existing, on_gpu)
    outcomes = run_sweep(plan, console, target)
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
    config: Path, changes: list[str], arms: list[Arm], device: str | None, check_device: bool
) -> set[str]:
    """The devices of all arms; UserError, naming the arm, if its settings are wrong."""
    # An error in the common settings should not be reported as one of an arm.
    check_metric(load_settings(config, changes, device, check_device))
    devices = set()
    for arm in arms:
        try:
            settings = load_settings(config, [*changes, *arm.changes], device, check_device)
            check_metric(settings)
        except UserError as error:
            raise UserError(f"--arm {arm.name!r}: {error}") from None
        devices.add(settings.train.device)
    return devices


def _check_resumed(
    config: Path, changes: list[str], arms: list[Arm], seeds: Sequence[int], device: str | None
) -> None:
    """UserError if a run began with other settings: the rest would be trained with these."""
    for arm in arms:
        for seed in seeds:
            began = arm.run_folder(seed) / "config.json"
            if exists(began) and _is_readable(began):
                own = [f"train.seed={seed}", *changes, *arm.changes]
                settings = load_settings(config, own, device, check_device=False)
                check_same_config(settings, began, measured={"reference_loss"})


def _is_readable(path: Path) -> bool:
    """Whether a file is intact. A damaged run fails by itself and does not stop the others."""
    try:
        read_json(path)
    except UserError:
        return False
    return True


def _open_cluster(
    name: str | None, settings: list[str], folder: Path, overwrite: bool
) -> Cluster | None:
    if name is None:
        if settings:
            raise UserError(f"--cluster-set {settings[0]} needs --cluster")
        return None
    if overwrite:
        raise UserError(
            "--overwrite cannot be used with --cluster: a job that is queued again would "
            "overwrite its own run"
        )
    return Cluster(name, parse_settings(settings), folder)


def _leave_out_damaged(outcome: ArmOutcome) -> None:
    """Count a run whose files cannot be read as failed, so that the others have results."""
    for seed in list(outcome.ended):
        try:
            load_run(outcome.arm.run_folder(seed))
        except UserError as error:
            print_line(
                f"warning: {outcome.arm.label(seed)}: {error}; it is left out of the results"
            )
            outcome.ended.remove(seed)
            if seed not in outcome.failed:
                outcome.failed.append(seed)


def _write_only(outcome: ArmOutcome, name: str, results: Path | None) -> None:
    """Write results and report of a sweep without arms."""
    collected = _write_results(outcome)
    if results is not None:
        write_json(results, collected)
    print_line(results_table(collected, name))
    print_line(f"report: {write_report(outcome.folders, outcome.arm.folder / 'report').page}")


def _write_results(outcome: ArmOutcome) -> dict[str, Any]:
    """Write the results file of one arm into its folder, with the command of the sweep."""
    collected = collect_results(outcome.folders) | {"command": command()}
    write_json(outcome.arm.folder / "results.json", collected)
    return collected


def _write_arms(ended: list[ArmOutcome], seeds: int, folder: Path, results: Path | None) -> None:
    """Write the results of each arm and of all arms, then the comparison and the reports."""
    for outcome in ended:
        _write_results(outcome)
    conditions = [
        Condition(one.arm.name, one.arm.changes, load_condition(one.folders), seeds)
        for one in ended
    ]
    collected = collect_arms(conditions) | {"command": command()}
    for path in filter(None, (folder / "results.json", results)):
        write_json(path, collected)
    table = arms_table(conditions, collected)
    write_comparison(conditions, table, folder)
    for outcome in ended:
        page = write_report(outcome.folders, outcome.arm.folder / "report").page
        print_line(f"report of {outcome.arm.name}: {page}")
    if console.is_terminal:
        render(table, console)
    else:  # a log file has no width to fit a table to
        print_line(to_markdown(table))
    print_line(f"comparison: {folder / 'arms.md'}, {folder / 'arms.png'}")
