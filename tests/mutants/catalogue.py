"""Known bugs to plant, each a change of one text in one file, and the narrowest tests that must notice it.

They are mistakes against the promises that the loop rests on: what a checkpoint covers, what is read again after a
restart, which tokens are trained, what a fenced worker may still do. A later letter is the same mistake elsewhere.
Those of checkpoints and restarts from 17 on are in ``restarts``, those of whose run it is, of strangers' text and code,
and of what watches a run in ``promises``, those of a user's data, tokens and rewards in ``inputs``.
"""

from tests.mutants.inputs import INPUTS
from tests.mutants.mutant import Mutant
from tests.mutants.promises import PROMISES
from tests.mutants.restarts import RESTARTS

INGEST, TRAINING, GENERATION = "tests/consumers/ingest", "tests/consumers/training", "tests/producers/generation"

MUTANTS = (
    # A step's report, and with it the offsets, goes out in its transaction before the step's checkpoint is written.
    Mutant(
        "01",
        "offsets committed before the checkpoint: the step's transaction",
        "consumers/training/trainer.py",
        """            with timer.measure("save_ckpt"):
""",
        """            await session.announce(report)
            with timer.measure("save_ckpt"):
""",
        (
            f"{TRAINING}/test_trainer_failures.py::test_a_checkpoint_is_announced_after_it_is_written",
            f"{TRAINING}/test_trainer_failures.py::test_a_checkpoint_is_written_before_offsets_behind_it_are_committed",
        ),
    ),
    # The low-water mark of a partition is the record after the first unfinished one.
    Mutant(
        "02",
        "frontier off by one: the low-water mark passes the first unfinished record",
        "consumers/ingest/frontier.py",
        "self.read[0] if self.read else self.position",
        "self.read[0] + 1 if self.read else self.position",
        (f"{INGEST}/test_frontier.py::test_the_low_mark_never_passes_an_unfinished_record",),
    ),
    # A resumed reader starts without the finished groups that its checkpoint holds.
    Mutant(
        "03",
        "finished groups dropped at resume",
        "consumers/training/resume.py",
        'finished_groups=FinishedGroups.from_json(document["finished_groups"]),',
        "finished_groups=FinishedGroups(),",
        (
            f"{TRAINING}/test_resume.py::test_a_reader_goes_on_where_the_checkpoint_was_taken_with_rows_of_its_own",
            f"{TRAINING}/test_trainer.py::test_a_repeated_trajectory_is_not_trained_twice",
        ),
    ),
    # The age of a trajectory is that of the newest weights that sampled a token of it, not of the oldest.
    Mutant(
        "04",
        "staleness checked against the newest version span",
        "consumers/ingest/filters.py",
        "return min((span.version.number",
        "return max((span.version.number",
        (f"{INGEST}/test_staleness.py::test_the_oldest_span_counts_by_its_number_whatever_its_lineage",),
    ),
    # A group is closed and handed on, to be given advantages, while one of its samples is still missing.
    Mutant(
        "05",
        "advantages over an incomplete group",
        "consumers/ingest/groups.py",
        "len(entry.samples) + len(entry.rejections) == entry.wanted",
        "len(entry.samples) + len(entry.rejections) >= entry.wanted - 1",
        (f"{INGEST}/test_groups.py::test_a_group_is_whole_when_every_sample_is_accounted_for",),
    ),
    # Where samples are padded to a batch: the last token of the prompt is trained, the last of the completion is not.
    Mutant(
        "06",
        "loss mask shifted by one: in the micro-batch",
        "consumers/batching/micro_batches.py",
        "loss_mask[row, start:end] = ",
        "loss_mask[row, start - 1 : end - 1] = ",
        ("tests/consumers/batching/test_samples.py::test_rows_are_right_padded_and_aligned_with_their_tokens",),
    ),
    # The same where the learner takes the micro-batch's mask.
    Mutant(
        "06b",
        "loss mask shifted by one: in the learner",
        "consumers/training/step.py",
        "mask = torch.tensor(batch.loss_mask)  # float32 [B, S]",
        "mask = torch.tensor(batch.loss_mask).roll(-1, 1)",
        (f"{TRAINING}/test_step.py::test_the_gradient_is_that_of_the_completions_tokens_and_of_no_others",),
    ),
    # The manifest of a checkpoint is created in the object store before the files that it names are uploaded.
    Mutant(
        "07",
        "checkpoint manifest written first: in an object store",
        "consumers/training/checkpoints/storage.py",
        """        self._sweep(uploads, manifest.lineage + 1)
""",
        """        self._sweep(uploads, manifest.lineage + 1)
        self._create(_manifest_key(slot), encode_manifest(manifest))
""",
        (f"{TRAINING}/checkpoints/test_objects.py::test_the_manifest_comes_last",),
    ),
    # The manifest is written to the checkpoint's final directory before the staged files are renamed to it.
    Mutant(
        "07b",
        "checkpoint manifest written first: in a local directory",
        "consumers/training/checkpoints/storage.py",
        """        written = staged / STATE / MANIFEST
""",
        """        early = self.root / slot.name / STATE
        early.mkdir(parents=True, exist_ok=True)
        (early / MANIFEST).write_bytes(encode_manifest(manifest))
        written = staged / STATE / MANIFEST
""",
        (f"{TRAINING}/checkpoints/test_local.py::test_a_checkpoint_gets_its_name_when_all_of_it_is_on_the_disk",),
    ),
    # An exported version gets the name under which it can be fetched with the next export, after it was announced.
    Mutant(
        "08",
        "weights announced before they are fetchable",
        "streamrl/weights/export.py",
        """        with appearing_directory(self.root / str(version)) as directory:
""",
        """        for late in self.root.glob("late-*"):
            late.rename(self.root / late.name.removeprefix("late-"))
        with appearing_directory(self.root / f"late-{version}") as directory:
""",
        (
            "tests/weights/test_export.py::test_the_manifest_describes_every_file_and_its_checksum_is_returned",
            f"{TRAINING}/test_trainer.py::test_the_first_report_makes_the_initial_weights_available",
        ),
    ),
    # The report goes out while its weights are still being exported.
    Mutant(
        "08b",
        "a step announced beside the export of its weights",
        "consumers/training/session.py",
        "        message = await make()\n",
        """        message = make.args[1] if isinstance(make, partial) and len(make.args) > 1 else await make()
""",
        (
            f"{TRAINING}/test_background_export.py::test_every_announced_version_can_be_fetched",
            f"{TRAINING}/test_background_export.py::test_the_next_step_is_computed_while_weights_are_exported",
        ),
    ),
    # What is exported beside the next step are the tensors that this step changes.
    Mutant(
        "08c",
        "weights exported that are not a copy",
        "consumers/training/model.py",
        "        return self._memory\n",
        "        return named_tensors(model)\n",
        (
            f"{TRAINING}/test_background_export.py::test_the_next_step_is_computed_while_weights_are_exported",
            f"{TRAINING}/test_background_export.py::test_a_copy_stays_as_it_was_until_the_next_one",
        ),
    ),
    # The next copy does not wait until the one before is exported, and is taken into the same memory.
    Mutant(
        "08d",
        "weights copied over those that are being exported",
        "consumers/training/session.py",
        "        await self.announcements.made()\n        return await self.compute(self.policy.snapshot)",
        "        return await self.compute(self.policy.snapshot)",
        (f"{TRAINING}/test_background_export.py::test_the_next_step_is_computed_while_weights_are_exported",),
    ),
    # The fence lets a worker pass that knows that another one has its id.
    Mutant(
        "09",
        "a worker publishes after being fenced: the fence lets it pass",
        "producers/generation/outbox.py",
        """        if self.superseded is not None:
            raise self.superseded
""",
        "",
        (
            f"{GENERATION}/test_fence.py::test_a_zombie_publishes_nothing",
            f"{GENERATION}/test_worker_succession.py::"
            "test_a_worker_that_was_suspended_hands_nothing_over_before_it_has_read_control",
        ),
    ),
    # The fence holds, but the worker's outbox is given the publisher that does not pass it.
    Mutant(
        "09b",
        "a worker publishes after being fenced: its outbox goes past the fence",
        "producers/generation/worker.py",
        "Outbox(fenced, ",
        "Outbox(publisher, ",
        (
            f"{GENERATION}/test_worker_succession.py::"
            "test_a_worker_that_was_suspended_hands_nothing_over_before_it_has_read_control[off]",
        ),
    ),
    # A trajectory goes to the partition of its own length's bucket, not to the one that the order says.
    Mutant(
        "10",
        "length bucket computed per sample: from its actual length",
        "producers/generation/worker.py",
        """            record = Outgoing.of(topic, message, key=order.group_id, partition=order.partition)
""",
        """            loop = LoopSettings()
            partition = loop.partition_of(loop.bucket_of(len(trajectory.token_ids)), order.position)
            record = Outgoing.of(topic, message, key=order.group_id, partition=partition)
""",
        (
            f"{GENERATION}/test_worker.py::test_an_order_becomes_one_trajectory_per_sample_on_its_partition",
            f"{GENERATION}/test_orders.py::test_samples_of_one_group_go_where_their_order_says_whatever_their_lengths",
        ),
    ),
    # Only a sample that is longer than predicted goes elsewhere: to a later partition.
    Mutant(
        "10b",
        "length bucket computed per sample: if it is longer than predicted",
        "producers/generation/worker.py",
        """            record = Outgoing.of(topic, message, key=order.group_id, partition=order.partition)
""",
        """            partition = order.partition + (len(trajectory.token_ids) > order.estimate.upper)
            record = Outgoing.of(topic, message, key=order.group_id, partition=partition)
""",
        (f"{GENERATION}/test_orders.py::test_samples_of_one_group_go_where_their_order_says_whatever_their_lengths",),
    ),
    # Recorded log-probabilities are of the truncated distribution that tokens were drawn from; no trainer scores it.
    Mutant(
        "11",
        "log-probabilities of the truncated distribution",
        "producers/generation/engines/slots.py",
        "(scaled.gather(1, choice) - whole.log_total).float()",
        "(scaled.gather(1, choice) - mass.log_total).float()",
        (
            f"{GENERATION}/engines/test_on_policy.py::test_logprobs_are_what_the_trainer_computes",
            f"{GENERATION}/engines/slots/test_sampling.py::"
            "test_tokens_are_of_the_truncated_distribution_and_their_logprobs_of_the_whole_one",
        ),
    ),
    # A stop string that two tokens make up together is not noticed.
    Mutant(
        "12",
        "stop strings looked for within single tokens",
        "producers/generation/incremental_text.py",
        "text = self._tail + self._text.decode_next(",
        "text = self._text.decode_next(",
        (
            f"{GENERATION}/engines/test_stop_matcher.py::"
            "test_the_first_token_after_which_the_text_has_a_stop_string_ends_it",
        ),
    ),
    # The snapshot is taken once the rows are on the topic: it has what was skipped meanwhile, whose row may be lost.
    Mutant(
        "13",
        "snapshot taken after its rows settled",
        "consumers/training/session.py",
        """        snapshot = self.reader.snapshot()
        context.failpoint(Failpoint.SNAPSHOT_TAKEN)
        # A restart announces only this step's report again, so earlier ones must be on the topic by now.
        await self.announcements.settled()
        # The snapshot's records are never read again, so a row lost now would leave a record without an outcome.
        await self.reader.flush()
""",
        """        await self.announcements.settled()
        await self.reader.flush()
        snapshot = self.reader.snapshot()
        context.failpoint(Failpoint.SNAPSHOT_TAKEN)
""",
        (f"{TRAINING}/test_trainer_failures.py::test_a_checkpoint_claims_no_row_that_it_has_not_waited_for",),
    ),
    # Of the groups that share a chunk of bits only the one that ended last is remembered.
    Mutant(
        "14",
        "finished groups forgotten",
        "consumers/ingest/ledger.py",
        "self._whole.get(place, 0) | 1 << bit",
        "1 << bit",
        (
            f"{INGEST}/test_finished_groups.py::test_a_finished_sample_is_never_forgotten",
            f"{INGEST}/test_finished_groups.py::test_every_repeat_is_found_since_every_sample_of_a_closed_group_is_recognised",
        ),
    ),
    # A restarted dispatcher takes a worker that it has only read of for one that is there.
    Mutant(
        "15",
        "a heartbeat of the past taken for a sign of life",
        "producers/dispatch/fleet.py",
        "            self._recalled.add(heartbeat.worker_id)\n",
        "            pass\n",
        ("tests/producers/dispatch/test_recovery.py::test_the_clocks_of_workers_decide_nothing",),
    ),
    # What the trainer skipped is applied after all of its steps, and so after a newer lineage has undone some of it.
    Mutant(
        "16",
        "skip rows of an older lineage applied behind the next one's first report",
        "producers/dispatch/recovery.py",
        "            while rows and (rows[0].lineage, rows[0].step) < report.version:",
        "            while False:",
        (
            "tests/producers/dispatch/test_recovery.py::test_a_trainer_that_resumed_gets_its_groups_back_after_our_restart_too",
        ),
    ),
    Mutant(
        "16b",
        "skip rows of a lineage that was left behind counted",
        "producers/dispatch/recovery.py",
        "            [row for row in self.rows if chain.holds_row(row)],",
        "            self.rows,",
        ("tests/producers/dispatch/test_recovery.py::test_rows_of_an_abandoned_lineage_do_not_count",),
    ),
    *RESTARTS,
    *PROMISES,
    *INPUTS,
)
