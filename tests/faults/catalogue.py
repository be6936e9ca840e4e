"""Every fault that the project has an answer for: what breaks, what happens then, and the tests that break it.

``docs.generate`` writes `docs/faults.md` from it. Cases that share a number and differ by a letter are one fault in
several places.
"""

from collections.abc import Mapping
from dataclasses import dataclass

SECTIONS: Mapping[str, str] = {
    "A": "Broker and network",
    "B": "Workers, graders and the dispatcher",
    "C": "Trainer, checkpoints and instances",
    "D": "Weights",
    "E": "Gateway",
    "F": "Messages, settings and strangers",
}
"""The first letter of a case → what its section is about."""


@dataclass(frozen=True)
class Case:
    """One fault.

    ``tests``: paths below ``tests/``, with ``::`` and a function where one test shows it; ``chaos:NAME`` is a fault of
    ``python -m tests.chaos --only NAME``, ``simulation:NAME`` a scenario of ``python -m tests.simulation``.
    ``seen``: what a user sees of it, empty where there is nothing to see.
    """

    id: str
    breaks: str
    outcome: str
    seen: str
    tests: tuple[str, ...]


CASES = (
    Case(
        "A1",
        "the broker gets SIGKILL during a send, or is restarted",
        (
            "Senders repeat every send of unknown outcome, readers go on at their own offsets. Records flow "
            "again at most 15 s after the broker answers again. Nothing is lost or written twice."
        ),
        "",
        (
            "chaos:broker-kill",
            "chaos:broker-restart",
            "faults/test_broker.py::"
            "test_after_a_killed_broker_came_back_records_flow_within_fifteen_seconds_and_each_transaction_is_whole",
        ),
    ),
    Case(
        "A2",
        "the broker is suspended and resumed",
        "No send reports a false success. Sends of unknown outcome are resolved by id.",
        "",
        (
            "chaos:broker-pause",
            "faults/test_broker.py::test_a_broker_that_hangs_loses_nothing_and_confirms_nothing_falsely",
        ),
    ),
    Case(
        "A3",
        "the broker is away for 30 to 40 s",
        "Workers stop starting completions and grow by at most 64 MiB. They deliver afterwards.",
        "",
        (
            "chaos:broker-outage",
            "producers/generation/test_worker.py::test_no_new_work_starts_while_the_broker_is_down",
            "producers/generation/test_outbox.py::test_the_outbox_is_full_while_the_broker_is_down",
        ),
    ),
    Case(
        "A4",
        "three brokers are restarted one after the other",
        "No process of the run dies.",
        "",
        ("chaos:rolling-restart",),
    ),
    Case(
        "A4a",
        "three brokers get SIGKILL one after the other, under load",
        "The run reaches its last step.",
        "",
        ("chaos:node-by-node-kill",),
    ),
    Case(
        "A5",
        "two of three brokers are down",
        ("Nothing is acknowledged until two are back. Nothing acknowledged is lost. The run reaches its last step."),
        "a pause",
        ("chaos:two-of-three-down",),
    ),
    Case(
        "A6",
        "connections are half open: nothing arrives in one or both directions",
        "Clients notice it within the request time-out and reconnect.",
        "",
        (
            "chaos:network-half-open",
            "chaos:network-one-way",
            "faults/test_network.py::test_a_half_open_connection_is_noticed_within_the_request_timeout_and_heals",
            "chaos:network-reset",
            "chaos:network-cut",
        ),
    ),
    Case(
        "A7",
        "the network has 500 ms latency and 1 MB/s",
        "The run is slower. Nothing else changes.",
        "",
        (
            "chaos:network-slow",
            "faults/test_network.py::test_latency_and_little_bandwidth_are_slower_and_nothing_else",
        ),
    ),
    Case(
        "A8",
        "the transaction coordinator or a partition's leader is killed in a transaction",
        "Each announcement is whole. No version is announced in two ways.",
        "",
        (
            "chaos:transaction-coordinator-kill",
            "chaos:leader-kill",
            "faults/test_broker.py::"
            "test_after_a_killed_broker_came_back_records_flow_within_fifteen_seconds_and_each_transaction_is_whole",
        ),
    ),
    Case(
        "A9",
        "the trainer is killed with an open transaction",
        "Readers wait no longer than the transaction's time-out. The trainer's next life announces again.",
        "",
        (
            "chaos/crashing/test_crash_points.py",
            "faults/test_transactions.py::test_a_dead_holders_transaction_holds_readers_up_no_longer_than_its_time_out",
        ),
    ),
    Case(
        "A10",
        "the trajectories topic is deleted and created again",
        "The trainer refuses to go on: a finished record below its frontier is not the one it knew.",
        "exit code 4",
        (
            "chaos:topic-recreated",
            "consumers/ingest/test_opening.py::test_a_recreated_topic_is_recognised_by_a_record_below_the_frontier",
        ),
    ),
    Case(
        "A11",
        "partitions are added to the trajectories topic",
        "A running trainer does not see the new partition. Its next life accounts for the records there.",
        "",
        (
            "chaos:partition-added",
            "bus/kafka/test_topic_admin.py::test_partitions_are_added_and_never_taken_away",
        ),
    ),
    Case(
        "A12",
        "retention deletes records that the trainer has not read",
        (
            "The trainer refuses to start. With `ingest.accept_loss` it goes on, and the hole gets a row "
            "`retention_expired`."
        ),
        "exit code 4 and the missing offsets",
        (
            "chaos:retention-expired",
            "consumers/ingest/test_opening.py::test_an_accepted_hole_gets_one_row_and_reading_continues_after_it",
        ),
    ),
    Case(
        "A13",
        "the run is idle for a long time",
        (
            "Clients reopen connections that were closed in idleness. The first record arrives within 5 s. "
            "Empty polls leave no memory behind."
        ),
        "",
        (
            "faults/test_idleness.py::test_the_first_record_after_idleness_comes_within_five_seconds",
            "bus/kafka/test_idle.py::test_thousands_of_empty_polls_leave_no_memory_behind",
        ),
    ),
    Case(
        "A14",
        "a clock is set, or a machine's clock is wrong",
        (
            "Liveness goes by arrival of heartbeats on the reader's monotonic clock. The broker stamps records "
            "(`LogAppendTime`). A restarted dispatcher orders history by lineage, step and number. So no group "
            "stays in flight, no lease changes, no record is refused or deleted."
        ),
        "times and ages in displays are off; `streamrl doctor` reports by how much",
        (
            "producers/dispatch/test_recovery.py::test_no_clock_that_is_set_keeps_groups_in_flight",
            "producers/dispatch/test_recovery.py::test_the_clocks_of_workers_decide_nothing",
            "chaos:clock-steps",
            "bus/kafka/test_topic_admin.py::test_a_writer_s_wrong_clock_neither_refuses_nor_ages_a_record",
            "simulation:clocks",
        ),
    ),
    Case(
        "A15",
        "a partition's leader is unreachable for some or all, or its disk is slow",
        "All rules of the simulation hold. The run reaches its last step.",
        "",
        (
            "chaos:leader-cut-off",
            "chaos:leader-partitioned",
            "chaos:leader-isolated",
            "simulation:three-brokers",
        ),
    ),
    Case(
        "A16",
        "a task of a Kafka client ends by itself",
        "Sends in flight have an unknown outcome and are sent again. A new client sends what follows.",
        "",
        (
            "bus/kafka/test_publisher.py::test_a_broken_producer_is_replaced",
            "bus/kafka/test_transactional.py::test_a_broken_transactional_producer_is_replaced",
            "bus/kafka/test_aiokafka_internals.py::test_a_request_does_not_outlive_its_sender_that_fails",
            "bus/kafka/test_stall_detector.py",
        ),
    ),
    Case(
        "A17",
        "a broker dies while a process opens its transactional id again",
        (
            "A restarted Kafka 4.3 forgets the epoch it gave out (KAFKA-20357), so the holder looks superseded. "
            "The trainer checks the topics and opens the id again. A dispatcher, coordinator or evaluator ends "
            "and is restarted. Of two real holders the newer one stays."
        ),
        "`process died, restarting`, ended with code 3",
        ("faults/test_transactions.py",),
    ),
    Case(
        "B1",
        "a worker gets SIGKILL while it generates",
        (
            "It is restarted. After `loop.heartbeat_timeout_s`, or at its successor's first heartbeat, the "
            "missing samples are ordered again. Finished samples stay. At most one gradient per id."
        ),
        "`worker lost` in the coordinator's log",
        (
            "chaos:worker-kill",
            "chaos:all-kill",
            "producers/dispatch/test_dispatcher.py::test_a_dead_worker_is_noticed_within_ten_seconds",
        ),
    ),
    Case(
        "B2",
        "a send times out, arrives later and is sent again; a trained record is repeated",
        "The trajectory is trained once. The repeat gets a row `duplicate`, however late it arrives.",
        "",
        (
            "chaos:late-sends",
            "chaos:duplicates",
            "chaos:network-one-way",
            "producers/generation/test_redelivery.py",
            "consumers/ingest/test_finished_groups.py::test_every_repeat_is_found_since_every_sample_of_a_closed_group_is_recognised",
            "bus/kafka/test_publisher.py::"
            "test_while_the_broker_is_away_all_calls_end_in_time_and_once_it_is_back_they_go_on",
            "simulation:thousands",
        ),
    ),
    Case(
        "B3",
        "a worker joins late",
        "It has the newest version before its first token.",
        "",
        ("producers/generation/test_worker.py::test_a_late_joiner_takes_only_the_newest_weights",),
    ),
    Case(
        "B4",
        "a worker misses versions and comes back",
        "It jumps to the newest version. Samples that are too old get a row `stale`.",
        "",
        (
            "chaos:worker-pause",
            "weights/test_fetch_and_adopt.py::test_latest_version_wins",
        ),
    ),
    Case(
        "B5",
        "weights change in the middle of a completion",
        (
            "Each token's version is recorded, and its log-probability is that version's. Workers that adopt "
            "when idle do not wait for ever, under any staleness bound."
        ),
        "",
        (
            "producers/generation/engines/slots/test_decoder.py::"
            "test_spans_agree_with_their_versions_when_weights_arrive_in_flight",
            "producers/generation/engines/test_recompute.py",
            "weights/test_fetch_and_adopt.py",
            "simulation:idle",
        ),
    ),
    Case(
        "B6",
        "two workers have one id",
        "The newer one holds the id. The other publishes nothing more and ends.",
        'exit code 3, "superseded"',
        (
            "chaos:twin-workers",
            "producers/generation/test_worker_succession.py::"
            "test_one_incarnation_per_id_goes_on_the_newest_and_the_other_ends_superseded",
            "deploy/local/test_zombies.py::test_a_worker_that_stood_still_while_another_took_its_id_ends_superseded",
        ),
    ),
    Case(
        "B7",
        "a worker with half-done completions is killed, stopped, drained or preempted; tokens are durable",
        (
            "Other workers finish them. At most 2 % of their tokens are sampled twice (of real processes: "
            "twelve of each completion). Spans, log-probabilities and parts are right. A stopped worker first "
            "writes its last tokens."
        ),
        ("`trajectory continued` in the worker's log; `continued` in `audit`; `streamrl show` names the workers"),
        (
            "producers/generation/test_partials.py::test_half_done_completions_of_a_killed_worker_are_finished_elsewhere",
            "producers/generation/test_partials.py::test_a_worker_that_leaves_hands_over_up_to_its_last_token",
            "producers/generation/engines/test_continuing.py",
            "chaos/halfway/test_half_done.py::test_half_done_completions_of_a_killed_worker_process_are_finished_elsewhere",
            "chaos:continuing-kill",
            "chaos:chunk-points",
            "simulation:partial-trajectories",
        ),
    ),
    Case(
        "B7a",
        "source, target or dispatcher is killed while a group moves (`dispatch.repack`)",
        (
            "Each sample is finished by one worker, none twice. If the target dies, the group is ordered again. "
            "A move is not a failed attempt."
        ),
        "",
        (
            "producers/dispatch/test_moving.py",
            "producers/generation/test_releases.py",
            "chaos:source-kill",
            "chaos:target-kill",
            "chaos:mover-kill",
            "chaos:let-go-points",
            "chaos:take-back-points",
            "simulation:repack",
            "simulation:repack-slow-rewards",
        ),
    ),
    Case(
        "B8",
        "every process is killed at once; tokens are durable",
        "Dispatcher and workers find orders and tokens on the topics and go on.",
        "",
        (
            "producers/generation/test_partials.py::test_everything_restarted_goes_on_where_it_stood",
            "chaos/halfway/test_half_done.py::test_half_done_completions_are_finished_after_everything_was_killed",
            "chaos/halfway/test_half_done.py::test_nor_is_anything_sampled_again_where_the_broker_was_killed_too",
            "chaos:all-kill",
            "simulation:partial-trajectories",
        ),
    ),
    Case(
        "B9",
        "a worker thought dead goes on writing and delivers late",
        "Tokens of two processes are never mixed. The late trajectory is a duplicate of another attempt.",
        "",
        (
            "producers/generation/test_partials.py::test_every_prefix_is_of_one_process",
            "simulation/test_simulation.py::test_tokens_of_two_processes_that_are_joined_are_found",
        ),
    ),
    Case(
        "B10",
        "a grader is killed, stopped, suspended; two have one id; all are restarted",
        (
            "Its share goes to the other graders, at once or after ten seconds. What the group committed is a "
            "trajectory. Samples graded twice are skipped as `duplicate`."
        ),
        "`grader's share` in the graders' logs; `streamrl lag`",
        (
            "chaos:grader-kill",
            "pipeline/test_changing_run.py",
            "producers/grading/test_grader.py::test_samples_of_a_dead_grader_are_graded_by_another",
            "producers/grading/test_grader.py::test_members_share_the_partitions_and_take_over_those_of_who_leaves",
            "contract/test_groups.py",
            "simulation:graders",
        ),
    ),
    Case(
        "B11",
        "a judge fails or hangs, for some samples or for all",
        ("It is called three times. Then the sample goes on without that reward, and its group can end."),
        "`no reward from a judge` in the log; dead letters `GradingFailed`; rows `poison`",
        (
            "producers/grading/test_scoring.py",
            "producers/grading/test_grader.py::test_a_failing_judge_loses_no_sample",
            "producers/rewards/test_judges.py",
        ),
    ),
    Case(
        "B12",
        "the dispatcher is restarted while samples are with graders",
        "Samples that are being graded are not ordered again. The staleness bound holds.",
        "",
        (
            "producers/dispatch/test_grading.py",
            "simulation:graders",
        ),
    ),
    Case(
        "B13",
        "all graders are gone",
        "Samples stay on `ungraded`. Admission sends no more prompts than the staleness bound allows.",
        "`streamrl lag`, `audit`",
        ("simulation:graders",),
    ),
    Case(
        "B14",
        "a worker sends heartbeats but makes no progress",
        (
            "Heartbeats say how long each order has stalled. After `dispatch.order_timeout_s` the order goes to "
            "another worker."
        ),
        "`group ordered again` in the dispatcher's log",
        ("producers/dispatch/test_dispatcher.py::test_an_order_that_a_worker_swallows_goes_to_another_after_its_time",),
    ),
    Case(
        "B15",
        "the dispatcher is killed",
        "It is rebuilt from work orders, trajectories, skips and steps.",
        "nothing",
        (
            "chaos:dispatcher-kill",
            "chaos:dispatcher-pause",
            "producers/dispatch/test_recovery.py",
            "simulation:control-plane",
        ),
    ),
    Case(
        "C1",
        "the trainer or one of its ranks gets SIGKILL at any named point of a commit",
        (
            "It is restarted and goes on from the newest checkpoint. Order, weights and optimizer state are "
            "bit-equal to an uninterrupted run. The books balance."
        ),
        "a gap of at most `checkpoint_every` steps in the curve; a new lineage in `audit`",
        (
            "chaos/crashing/test_crash_points.py::test_a_trainer_killed_at_a_point_of_its_commit_resumes_bit_equal",
            "consumers/training/checkpoints/test_crashes.py::"
            "test_a_writer_killed_at_any_system_call_leaves_the_old_or_the_new_checkpoint",
            "chaos:trainer-kill",
            "chaos:trainer-kill-ranks",
            "chaos:rank-kill",
        ),
    ),
    Case(
        "C2",
        "the trainer gets SIGTERM",
        "It writes a checkpoint and ends within the grace period.",
        "exit code 143",
        (
            "deploy/local/test_shutdown.py::test_sigterm_drains_every_process_within_its_grace_period",
            "consumers/training/test_trainer.py::test_a_stopped_trainer_leaves_a_checkpoint_that_transformers_load",
        ),
    ),
    Case(
        "C2a",
        "a command gets SIGTERM while it starts: imports, the demo's warm start, the broker",
        "It prints one line and leaves no process behind.",
        "exit code 143",
        (
            "schemas/test_stopping.py",
            "streamrl/cli/test_stops.py::test_sigterm_while_the_demo_starts_leaves_no_process_behind",
        ),
    ),
    Case(
        "C2b",
        "a process crashes while it is stopped, or a stranger sends it SIGTERM",
        "The command names the signal and the log, or starts the process again.",
        "exit code 7 for the crash",
        (
            "deploy/local/test_supervisor.py::test_a_crash_while_stopping_is_reported",
            "deploy/local/test_supervisor.py::test_a_process_stopped_by_an_outside_signal_is_restarted",
        ),
    ),
    Case(
        "C3",
        "a suspended trainer wakes up after a second one has started",
        (
            "The second claims the next lineage. Kafka and the checkpoint store both fence the first. Nothing "
            "it writes afterwards is read."
        ),
        'exit code 3, "superseded"; under `streamrl run` it stands by',
        (
            "chaos:trainer-zombie",
            "consumers/training/test_trainer_failures.py::"
            "test_a_fenced_trainer_that_waits_for_groups_ends_at_its_next_word",
            "consumers/training/checkpoints/test_checkpoint.py::test_a_superseded_writer_publishes_nothing",
        ),
    ),
    Case(
        "C3a",
        "a superseded trainer uploads or clears files late",
        "Its successor's checkpoints are unchanged.",
        "",
        (
            "consumers/training/checkpoints/test_objects.py::"
            "test_a_late_upload_of_a_superseded_trainer_is_not_taken_for_its_successors",
            "consumers/training/checkpoints/test_objects.py::"
            "test_a_trainer_that_stood_still_clears_nothing_of_its_successor_s_upload",
            "consumers/training/checkpoints/test_local.py",
        ),
    ),
    Case(
        "C3b",
        ("a manifest or a rename arrives while its files are cleared, or later; a claim falls between two requests"),
        ("A start finds a whole checkpoint or none. Missing files that nobody cleared are refused in one line."),
        "",
        (
            "consumers/training/checkpoints/test_late_requests.py",
            "simulation/test_simulation.py::"
            "test_a_clearing_that_leaves_no_mark_is_found_to_end_in_a_manifest_without_files",
        ),
    ),
    Case(
        "C4",
        "a checkpoint is truncated, or a bit of it flips",
        "The one before it is restored. The audit balances.",
        "a warning that names the file",
        (
            "chaos:checkpoint-truncated",
            "chaos:checkpoint-bit-flipped",
            "consumers/training/checkpoints/test_flipped_bytes.py",
        ),
    ),
    Case(
        "C4a",
        "an operator restores an older checkpoint",
        (
            "Later steps are undone, their checkpoints are kept, and older trainers are fenced. Undone "
            "trajectories are trained again. The audit balances."
        ),
        '"undone by the operator\'s restore" in `audit`',
        (
            "consumers/training/checkpoints/test_savepoints.py",
            "producers/dispatch/test_recovery.py::"
            "test_groups_that_a_restore_forward_again_has_trained_are_not_waited_for",
            "deploy/local/test_savepoints.py::test_a_restored_run_trains_the_undone_steps_again_and_its_audit_balances",
            "simulation:restores",
        ),
    ),
    Case(
        "C4b",
        "the run moves to another cluster, a mirror or a backup",
        (
            "The trainer refuses. With `ingest.translate_offsets` it finds finished trajectories by name; all "
            "others are pending. Missing ones are counted."
        ),
        "exit code 4; then figures in the log and in `audit`",
        (
            "inspection/test_another_cluster.py",
            "consumers/ingest/test_translation.py",
        ),
    ),
    Case(
        "C4c",
        "the leading trainer is killed while another stands by, or is only slow",
        ("The standby takes its next step within 10 s. Workers and dispatcher stay. A slow leader ends as superseded."),
        "`taking over`; a new lineage in `audit`",
        (
            "pipeline/test_changing_run.py",
            "consumers/standby/test_standby_trainer.py",
            "deploy/local/test_supervisor.py::test_a_superseded_trainer_stands_by",
        ),
    ),
    Case(
        "C4d",
        "the run's end is undone while processes are told of it",
        (
            "The coordinator announces that the run goes on, and ends. `streamrl run` restarts every process "
            "that left within a minute."
        ),
        "`told of an end that was undone: started again`; the coordinator's exit code 6",
        (
            "coordinator/test_coordinator.py::test_an_end_undone_during_its_announcement_is_an_error",
            "deploy/local/test_supervisor.py::test_processes_that_left_at_an_undone_end_are_restarted",
            "simulation/test_simulation.py::test_processes_that_left_at_an_undone_end_come_back_and_the_run_ends_well",
        ),
    ),
    Case(
        "C5",
        "the disk is full during a checkpoint",
        ("The trainer ends, and earlier checkpoints are intact. With room again, the run reaches its end."),
        "the bytes that were missing; exit code 5",
        (
            "chaos:checkpoint-disk-full",
            "consumers/training/checkpoints/test_full_disk.py::test_a_full_disk_leaves_the_checkpoints_as_they_were",
        ),
    ),
    Case(
        "C5a",
        "the disk is full under weights, logs or the rest",
        (
            "The run ends at once, because a restart would meet the same disk. Log lines without room are "
            "dropped. The same command goes on later."
        ),
        "exit code 5 and one line: directory, bytes needed, bytes free",
        (
            "streamrl/cli/test_mistakes.py::test_a_full_disk_is_one_line_and_an_exit_code_of_its_own",
            "streamrl/cli/test_mistakes.py::test_a_library_that_finds_no_room_is_one_line_as_well",
        ),
    ),
    Case(
        "C5b",
        "the object store is unreachable or has no credentials at the start; credentials may not delete",
        "Nothing is started or written. Without the right to delete, training goes on and old files stay.",
        "exit code 2 and one line; one warning",
        (
            "consumers/training/checkpoints/test_objects.py",
            "deploy/local/test_refused_start.py",
        ),
    ),
    Case(
        "C6",
        "partitions are rebalanced within a group",
        "The trainer's partitions are assigned, never rebalanced. Live and durable frontier are kept apart.",
        "",
        (
            "consumers/training/test_trainer_failures.py::"
            "test_the_durable_frontier_is_the_checkpoint_s_and_the_live_one_runs_ahead",
            "contract/test_bus.py::test_a_commit_does_not_move_a_new_reader",
        ),
    ),
    Case(
        "C7",
        "an optimizer step takes longer than a session time-out",
        "There is no session to lose. The trainer goes on.",
        "",
        (
            "chaos:trainer-pause",
            "deploy/wiring/test_watchdog.py::test_a_process_that_was_stopped_for_a_while_goes_on",
        ),
    ),
    Case(
        "C8",
        "the loss or the gradient is NaN, or the gradient spikes",
        "The step is skipped and its records are named. The weights are unchanged.",
        "",
        (
            "consumers/training/test_trainer_failures.py::"
            "test_a_refused_step_names_its_records_and_the_next_one_counts_from_zero",
            "consumers/training/test_step.py::test_a_spiking_gradient_is_not_applied",
        ),
    ),
    Case(
        "C9",
        "a group stays incomplete; a prompt kills every worker",
        ("After 10 orders the dispatcher publishes aborted samples. They complete the group, without any clock."),
        "`group given up`; rows `poison`",
        (
            "producers/dispatch/test_dispatcher.py::test_a_group_that_kills_its_workers_is_given_up",
            "consumers/ingest/test_reader.py::test_a_group_that_is_given_up_is_trained_with_what_there_is_of_it",
            "planning/test_simulation.py::test_no_sibling_is_dropped_or_ordered_again_however_far_apart_they_end",
        ),
    ),
    Case(
        "C9a",
        "fresher or likelier groups pass others; the trainer is killed, superseded or set back",
        ("Each group is trained within the bound or skipped as `stale`. None is trained twice, none waits for ever."),
        "",
        (
            "consumers/ingest/test_sampling.py",
            "producers/dispatch/test_admission.py::"
            "test_nor_is_one_where_places_are_kept_in_whatever_order_groups_are_taken",
            "simulation:sampling",
        ),
    ),
    Case(
        "C10",
        "a reward hangs, raises or returns NaN",
        "Each call has a time-out, the reason is recorded, and other samples are scored.",
        "",
        (
            "producers/rewards/test_runner.py::test_a_failing_reward_is_recorded_and_harms_no_other",
            "pipeline/test_user_errors.py::"
            "test_a_reward_function_that_fails_ends_the_run_and_every_skip_has_its_reason",
        ),
    ),
    Case(
        "C10a",
        "a reward forks, allocates, writes or connects without end",
        "`rewards.max_…` and `rewards.network` bound it. Only that sample fails.",
        "",
        ("producers/rewards/test_sandbox.py::test_a_hostile_reward_hits_limits_and_only_its_own_call_fails",),
    ),
    Case(
        "C11",
        "two algorithms read one topic and one stalls",
        "The other trains on. Each has its own lag, skips and commits.",
        "",
        ("consumers/ingest/test_isolation.py",),
    ),
    Case(
        "C11a",
        "an attached instance is killed, stopped, superseded, paused or detached; its broker goes away",
        "The run's own topics do not change. Both accounts balance.",
        "`process died, restarting` where it was attached",
        (
            "chaos:instance-kill",
            "pipeline/test_attached_run.py",
            "policies/test_following_trainer.py",
            "simulation:instances",
            "simulation:instances-from-now",
        ),
    ),
    Case(
        "C11b",
        "policies are promoted while trainers, coordinator, dispatcher and workers are killed or superseded",
        "Both accounts balance. No served step trains tokens older than the bound.",
        "",
        (
            "policies/test_following_trainer.py",
            "coordinator/test_coordinator.py",
            "producers/dispatch/test_recovery.py",
            "simulation:promotions",
            "simulation:promotions-from-now",
        ),
    ),
    Case(
        "C11c",
        "a policy is promoted during episodes, ratings or evaluation",
        ("Only the served policy's trainer makes room. No version is evaluated twice, or without an announcement."),
        "",
        (
            "producers/environments/test_driver.py::test_only_the_served_policy_ends_groups",
            "producers/environments/test_driver.py::test_groups_before_a_promoted_policy_are_not_awaited",
            "producers/gateway/test_feedback.py::test_the_answer_to_feedback_names_the_trained_policy",
            "policies/test_evaluating.py::test_a_promotion_is_not_missed_while_the_past_is_read",
        ),
    ),
    Case(
        "C11d",
        ("a split is ordered, changed and ended while processes are killed; an arm's instance is detached or promoted"),
        (
            "Both accounts balance. Unsent groups go to another arm, each once. Ages hold in served versions. "
            "No completion mixes two policies."
        ),
        "",
        (
            "pipeline/test_attached_run.py",
            "weights/test_relay_tier.py::"
            "test_weights_of_an_arm_go_down_the_same_chain_and_every_byte_crosses_each_link_once",
            "policies/test_arms.py",
            "policies/test_dispatching.py",
            "weights/test_fetch_and_adopt.py::test_no_completion_mixes_two_policies",
            "producers/evaluation/test_worker_samples.py::"
            "test_no_completion_mixes_two_policies_though_orders_come_while_evaluation_delays_an_arm",
            "producers/evaluation/test_evaluator.py::"
            "test_a_declined_order_is_sent_elsewhere_at_once_and_counts_as_no_loss",
            "weights/test_shared_weights.py::"
            "test_deltas_of_two_arms_of_the_same_numbers_are_each_applied_to_its_own_base",
            "simulation:splits",
            "simulation:splits-and-promotions",
        ),
    ),
    Case(
        "C11e",
        "an instance is attached twice; its command is killed while it holds the name",
        ("The second command is refused and writes nothing. A dead command's name is free after five seconds."),
        "exit code 2",
        (
            "policies/test_role_instance_trainer.py::test_a_name_is_held_once",
            "policies/test_role_instance_trainer.py::test_one_of_several_simultaneous_holders_gets_the_name",
            "policies/test_role_instance_trainer.py::"
            "test_a_name_is_free_at_once_when_it_was_given_back_and_after_a_while_when_its_command_died",
            "pipeline/test_attached_run.py",
        ),
    ),
    Case(
        "C11f",
        "an instance's trainer is killed once, and repeatedly; it is detached or stopped in the meantime",
        (
            "`streamrl attach` restarts it as a run restarts its processes. After `run.max_restarts` in a row "
            "the command ends."
        ),
        "one line: cause, count and log",
        (
            "pipeline/test_attached_run.py",
            "policies/test_role_instance_trainer.py",
        ),
    ),
    Case(
        "C12",
        ("the run's directory is lost; a second directory or person uses the name; checkpoints have two places"),
        (
            "The start is refused before anything is written, and nobody is fenced. `--adopt` goes on above all "
            "lineages and trains nothing of the earlier life."
        ),
        "exit code 2 and one line with the ways on; exit code 3 for the first after an adoption",
        (
            "consumers/training/test_identity.py",
            "deploy/local/test_refused_start.py",
            "simulation:directories",
            "deploy/local/test_resuming.py",
        ),
    ),
    Case(
        "C13",
        "a prompt cannot be sampled: too long, empty, without a chat template",
        "The worker names it and goes on. Its group is skipped as `refused`.",
        "`prompt refused` in the worker's log, thinned out",
        (
            "producers/generation/test_orders.py::"
            "test_a_prompt_that_the_engine_refuses_harms_no_other_and_is_logged_less_and_less_often",
            "deploy/compose/test_processes.py",
        ),
    ),
    Case(
        "C14",
        "nearly no prompt can be sampled",
        "The run does not start. Later, 51 refused prompts in a row end the trainer, or 90 % of the last 1000.",
        "exit code 2 and one line with the cause and a prompt",
        (
            "deploy/local/test_task_check.py::"
            "test_a_pointless_run_is_refused_with_one_of_the_prompts_that_cannot_be_sampled",
            "consumers/ingest/test_breaker.py::"
            "test_refused_prompts_are_skipped_by_that_name_and_all_of_them_end_the_trainer",
            "pipeline/test_emulated_run.py::test_a_run_whose_prompts_cannot_be_sampled_ends_with_one_line",
        ),
    ),
    Case(
        "C15",
        "memory runs out in a backward pass",
        (
            "The micro-batch is split and gives the same gradient. If one sample does not fit, its group is "
            "skipped. More than 8 groups in one step end the trainer."
        ),
        "`micro-batch split` in the log; rows `out_of_memory`; exit code 2 and what to lower",
        (
            "consumers/training/test_step.py::test_an_oversized_micro_batch_leaves_the_sums_unchanged",
            "consumers/training/test_out_of_memory.py",
        ),
    ),
    Case(
        "C16",
        "the coordinator is killed",
        "It is rebuilt from control and steps, and announces what was not announced.",
        "workers keep their weights a little longer",
        (
            "chaos:coordinator-kill",
            "chaos:coordinator-pause",
            "chaos:announcement-kill",
            "coordinator/test_coordinator.py::test_a_restarted_coordinator_goes_on_where_the_topics_end",
        ),
    ),
    Case(
        "D1",
        "a checksum of weights is wrong",
        "The version is refused and fetched again. The old weights serve.",
        "",
        (
            "weights/test_fetch_and_adopt.py::"
            "test_a_corrupted_file_is_refused_and_fetched_again_while_the_old_weights_serve",
        ),
    ),
    Case(
        "D2",
        "a relay dies in the middle of a transfer",
        "The reader continues by range, from it or from another relay.",
        "`weights not fetched`; `another upstream asked` at the next relay",
        (
            "chaos:relay-kill",
            "weights/test_fetch_and_adopt.py::test_nothing_is_fetched_twice",
            "chaos:relay-pause",
        ),
    ),
    Case(
        "D2a",
        "a relay with copies dies while a version arrives, or around its rename",
        "Received bytes are checked and kept. A version has its name only when it is whole.",
        "",
        (
            "chaos:copies-kill",
            "chaos:copy-points",
            "weights/test_relay_tier.py",
        ),
    ),
    Case(
        "D3",
        "a version is announced before it can be fetched",
        "The worker asks again.",
        "",
        ("weights/test_fetch_and_adopt.py::test_an_announcement_that_comes_before_its_files_is_asked_for_again",),
    ),
    Case(
        "D4",
        "a requested name leaves the store",
        "The relay answers 404 or 400. Nothing outside is read.",
        "",
        ("weights/test_relay.py::test_no_name_reaches_a_file_outside_the_store",),
    ),
    Case(
        "D5",
        "weights hold wrong tensors, or are a pickle",
        "They are refused before the engine is touched.",
        "",
        ("producers/generation/engines/test_model_files.py::test_weights_that_do_not_fit_are_refused_whole",),
    ),
    Case(
        "D6",
        "weights of an older lineage arrive late",
        "They are ignored.",
        "",
        (
            "coordinator/test_coordinator.py::test_weights_of_an_older_lineage_are_not_announced",
            "schemas/test_identifiers.py::test_weights_of_a_later_lineage_win_whatever_their_number",
        ),
    ),
    Case(
        "D6a",
        "weights are exported late, under an existing version, or into a store of an earlier life",
        "The store keeps what it has, the trainer goes on, and a new lineage starts above everything there.",
        "`weights not exported`, with the lineage that was found",
        (
            "weights/test_export.py",
            "policies/test_following_trainer.py::test_a_late_export_of_a_former_policy_is_refused_and_it_trains_on",
            "policies/test_following_trainer.py::test_its_lineages_begin_above_all_that_lies_where_its_weights_go",
        ),
    ),
    Case(
        "D7",
        "a version is deleted during its download",
        "The reader jumps to the newest.",
        "",
        ("weights/test_fetch_and_adopt.py::test_a_version_deleted_in_mid_download_is_left_for_the_newest",),
    ),
    Case(
        "D8",
        "the base or the delta of a version is lost, damaged or another one",
        "The whole file is fetched.",
        "",
        (
            "weights/test_shared_weights.py::test_without_base_or_delta_the_whole_file_is_fetched",
            "weights/test_shared_weights.py::test_a_version_in_the_cache_is_whole_or_thrown_away",
        ),
    ),
    Case(
        "D9",
        "a worker that fetches for its host dies or stalls",
        "Another worker continues, or fetches in parallel.",
        "",
        (
            "weights/test_shared_weights.py::test_another_goes_on_where_a_worker_died",
            "weights/test_shared_weights.py::test_a_stalled_worker_is_not_waited_for",
        ),
    ),
    Case(
        "D10",
        "the trainer is killed during a background export",
        "Every announced version can be fetched.",
        "",
        (
            "chaos/crashing/test_crash_points.py::test_a_trainer_killed_at_a_point_of_its_commit_resumes_bit_equal",
            "consumers/training/test_background_export.py::test_every_announced_version_can_be_fetched",
        ),
    ),
    Case(
        "D11",
        "a relay dies in the middle of a chain",
        "The next relay asks the one before it for the rest. No byte is sent twice.",
        "",
        (
            "weights/test_relay_tier.py::test_a_dead_relay_is_routed_around_in_the_middle_of_a_transfer",
            "weights/test_relay_chain.py",
        ),
    ),
    Case(
        "D12",
        "a chunk is damaged on the way",
        "The receiver refuses it, asks again and never passes it on.",
        "",
        ("weights/test_relay_tier.py::test_damage_is_found_at_once_and_only_verified_chunks_are_forwarded",),
    ),
    Case(
        "D13",
        "a version is deleted while it is read",
        "It stays for the reader and for a lease.",
        "",
        (
            "weights/test_relay_tier.py::test_leased_versions_are_kept_and_unread_ones_deleted",
            "weights/test_relay.py::test_a_version_that_is_read_stays_though_the_trainer_deletes_it",
        ),
    ),
    Case(
        "D14",
        "the weight sender is away or busy, lacks the version, or has another manifest or a damaged file",
        "The turn is refused, sampling goes on, and the worker fetches files.",
        "`weights not sent, fetching files`",
        (
            "weights/sending/test_sender.py",
            "weights/sending/test_sender.py::"
            "test_a_worker_begins_with_files_then_is_sent_to_and_takes_files_for_a_while_when_it_is_not",
        ),
    ),
    Case(
        "D15",
        "the weight sender or the engine dies or stalls during a transfer; bytes change on the way",
        (
            "That engine ends and emits no token of half-adopted weights. Its worker starts again with files. "
            "All others go on."
        ),
        "`weights half adopted`",
        (
            "weights/sending/test_sender.py::test_a_failed_turn_ends_its_session",
            "weights/sending/test_sender.py::test_a_collective_without_end_ends_the_sender",
            "producers/generation/engines/test_vllm_transfer.py::test_weights_that_arrive_damaged_end_the_engine",
        ),
    ),
    Case(
        "E1",
        "a requester sends any request, valid or not; our own code has a mistake",
        "No 5xx for a requester's mistake. Errors have the form that OpenAI's clients know.",
        "",
        (
            "producers/gateway/test_clients.py::test_no_request_makes_the_gateway_fail",
            "producers/gateway/test_door.py::test_unsupported_requests_are_refused_with_a_reason",
            "producers/gateway/test_door.py::test_an_internal_error_is_reported_without_details",
        ),
    ),
    Case(
        "E2",
        "a requester leaves in the middle of a stream",
        "Generation stops and its slot is free.",
        "",
        (
            "producers/gateway/test_gateway.py::test_a_disconnected_requester_frees_its_slots",
            "producers/gateway/test_clients.py::test_a_client_that_is_gone_frees_its_slot",
        ),
    ),
    Case(
        "E3",
        "a requester reads nothing",
        "It is cut off after 30 s. No other requester waits.",
        "",
        ("producers/gateway/test_gateway.py::test_a_reader_that_takes_nothing_is_made_to_leave",),
    ),
    Case(
        "E4",
        "there is no worker, no broker, or the engine hangs or fails",
        "The gateway answers 503 with `Retry-After`, or 502. No request hangs. Requests need no broker.",
        "",
        (
            "producers/gateway/test_gateway.py::test_without_a_worker_requests_are_refused_with_the_reason",
            "producers/gateway/test_gateway.py::"
            "test_done_is_sent_once_also_behind_the_error_of_a_request_that_takes_too_long",
            "producers/gateway/test_gateway.py::test_a_failed_engine_is_asked_again_from_the_last_token_on",
            "producers/gateway/test_gateway.py::test_requests_need_no_broker",
        ),
    ),
    Case(
        "E5",
        "ten times too many requests arrive",
        "Requests beyond the queue get 429 with `Retry-After`. Throughput stays. Training keeps its slots.",
        "",
        (
            "producers/gateway/test_gateway.py::test_requests_beyond_the_queue_are_refused_and_when_to_come_again",
            "producers/gateway/test_gateway.py::test_requests_keep_to_their_slots_and_orders_to_theirs",
        ),
    ),
    Case(
        "E6",
        "keys are bad, removed or missing; a foreign page asks; a completion is another key's",
        (
            "The gateway answers 401, 403 or 404 and reveals nothing. Only one's own completions can be rated. "
            "Secrets are in no log."
        ),
        "",
        (
            "producers/gateway/test_door.py::test_only_holders_of_a_key_are_answered",
            "producers/gateway/test_door.py::test_foreign_pages_are_refused",
            "producers/gateway/test_door.py::test_secrets_are_in_no_log",
            "producers/gateway/test_feedback.py::test_nothing_is_kept_without_consent",
        ),
    ),
    Case(
        "E7",
        "a worker is lost in the middle of a stream",
        (
            "Another continues from its last token, and each part has its version. Without another worker the "
            "stream ends with an error."
        ),
        "",
        (
            "producers/gateway/test_gateway.py::test_two_hundred_streams_continue_after_their_worker_is_lost",
            "producers/gateway/test_gateway.py::test_a_lost_worker_loses_no_request",
            "producers/gateway/test_gateway.py::test_without_another_worker_a_stream_ends_with_a_clear_error",
        ),
    ),
    Case(
        "E8",
        "broker or gateway goes away between a rating and the topic; a rating is sent twice",
        "Every acknowledged rating becomes one trajectory.",
        "",
        (
            "producers/gateway/test_feedback.py::test_a_reward_is_never_lost",
            "producers/gateway/test_feedback.py::test_feedback_may_be_repeated",
        ),
    ),
    Case(
        "F1",
        "the topic holds any bytes, bombs, truncations",
        "The bytes go to dead letters unchanged, with a row `poison`. No crash; memory is bounded.",
        "`streamrl dlq ls`",
        (
            "fuzz/test_generated.py",
            "fuzz/test_guided.py",
            "fuzz/test_bombs.py::test_no_frame_takes_more_than_64_mib_to_decode",
            "chaos:poison",
        ),
    ),
    Case(
        "F2",
        "a message comes from a newer writer",
        "Added fields are ignored. A newer schema is dead-lettered.",
        "",
        (
            "schemas/wire/test_codec.py::test_fields_of_a_newer_writer_are_ignored",
            "schemas/wire/test_codec.py::test_a_schema_that_is_unknown_or_newer_is_refused",
        ),
    ),
    Case(
        "F2a",
        "processes of two versions are replaced one by one",
        "Neighbouring wire versions read each other's messages both ways. Others end.",
        "exit code 2 and one line",
        (
            "contract/test_mixed_versions.py",
            "consumers/training/test_identity.py::"
            "test_a_process_of_a_distant_wire_version_can_neither_hold_nor_join_a_run",
        ),
    ),
    Case(
        "F3",
        "60 % of the records are poison",
        "A circuit breaker ends the trainer.",
        "exit code 2 and one line with the share",
        (
            "chaos:poison-flood",
            "consumers/ingest/test_breaker.py",
        ),
    ),
    Case(
        "F3a",
        "no group can be trained, for example since every reward is equal",
        "The trainer warns with reasons and an example. It ends after 400 groups in a row, or 20 steps of groups.",
        "exit code 4 and one line with the reasons, the latest group and what to do",
        (
            "consumers/ingest/test_skip_streak.py",
            "consumers/training/test_trainer.py::"
            "test_a_trainer_whose_groups_all_have_equal_rewards_ends_and_every_row_is_written",
        ),
    ),
    Case(
        "F3b",
        "every episode of an environment fails",
        "The run ends after 64 failures in a row; time-outs do not count. The dry run plays an episode.",
        "exit code 2 and one line with the environment and its last reason",
        (
            "producers/environments/test_driver.py::test_an_environment_that_always_fails_ends_the_run",
            "producers/environments/test_role.py::test_the_dry_run_finds_an_environment_whose_step_raises",
        ),
    ),
    Case(
        "F3c",
        "rewards of held-out completions raise",
        "The evaluator ends, and the run with it, as it does for rewards in training.",
        "exit code 2 and one line with the prompt, the reward and its reason",
        (
            "producers/evaluation/test_evaluator.py::"
            "test_held_out_rewards_that_fail_end_the_evaluation_with_their_reason",
        ),
    ),
    Case(
        "F4",
        "settings, data, addresses or commands are wrong",
        "One line with the key. Nothing is written.",
        "exit code 2, no traceback",
        (
            "pipeline/test_user_errors.py",
            "streamrl/cli/test_mistakes.py",
        ),
    ),
    Case(
        "F5",
        "a step is replayed",
        "The result is bit-equal, and nothing is written.",
        "",
        (
            "inspection/replay/test_replayer.py::test_every_step_of_a_run_with_a_crash_in_it_replays_bit_equal",
            "inspection/replay/test_command.py::test_a_replay_writes_nothing",
        ),
    ),
    Case(
        "F6",
        "prompts, completions, ids or errors hold hostile text",
        "Commands and logs escape control characters, escape sequences and direction overrides.",
        "`\\x1b` where the text had an escape",
        ("inspection/test_hostile_text.py",),
    ),
    Case(
        "F7",
        "secrets stand in settings, in the environment, or are asked for by a reward",
        "A secret is taken literally and never printed. Rewards do not see it.",
        "",
        (
            "settings/test_loading.py::test_no_secret_is_written",
            "streamrl/cli/test_secrets.py",
            "pipeline/test_secure_run.py",
            "producers/rewards/test_sandbox.py::"
            "test_reward_processes_get_no_secrets_and_only_variables_that_programs_need_or_the_user_names",
        ),
    ),
    Case(
        "F8",
        "pages of other sites ask the dashboard",
        "They are refused. Few scans run at once.",
        "",
        ("inspection/dashboard/test_guard.py",),
    ),
    Case(
        "F9",
        "a dead letter is retried twice at once",
        "It is sent once.",
        "",
        ("inspection/test_dead_letters.py::test_one_of_two_concurrent_retries_sends",),
    ),
)
"""In the order of their sections."""
