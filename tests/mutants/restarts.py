"""Bugs of what a checkpoint holds and of how a run goes on from it: reader, announcements, checkpoint storage."""

from tests.mutants.mutant import Mutant

INGEST, TRAINING = "tests/consumers/ingest", "tests/consumers/training"
CHECKPOINTS, STORAGE = f"{TRAINING}/checkpoints", "consumers/training/checkpoints"

RESTARTS = (
    # Finished groups of which samples are missing are not restored, so a late repeat of one is taken for new.
    Mutant(
        "03b",
        "samples of incomplete groups forgotten at resume",
        "consumers/ingest/ledger.py",
        'return cls(whole, {str(group_id): frozenset(map(int, came)) for group_id, came in data["partial"].items()})',
        "return cls(whole)",
        (f"{INGEST}/test_finished_groups.py::test_a_finished_sample_is_never_forgotten",),
    ),
    # The crash may have come between a checkpoint and the announcement of its step, which nobody makes then.
    Mutant(
        "17",
        "a restart does not announce its checkpoint's report again",
        "consumers/training/session.py",
        "            records.insert(0, again)  # in front: the first report names that step as its parent\n",
        "            log.debug('not announced again', record=again.key)\n",
        (
            f"{TRAINING}/test_trainer_failures.py::"
            "test_a_restart_announces_the_checkpoint_s_report_again_and_then_its_own_lineage",
        ),
    ),
    # What is finished while the checkpoint is written is in it, though neither weights nor rows are.
    Mutant(
        "18",
        "the snapshot shares the live frontier",
        "consumers/ingest/reader.py",
        "frontier=ledger.frontier.copy(),",
        "frontier=ledger.frontier,",
        (f"{TRAINING}/test_trainer_failures.py::test_a_checkpoint_claims_no_row_that_it_has_not_waited_for",),
    ),
    # The same of the groups that have ended.
    Mutant(
        "18b",
        "the snapshot shares the live finished groups",
        "consumers/ingest/reader.py",
        "finished_groups=ledger.finished_groups.copy(),",
        "finished_groups=ledger.finished_groups,",
        (f"{INGEST}/test_reader.py::test_a_resumed_reader_neither_repeats_nor_loses",),
    ),
    # A restart announces the report of its checkpoint's step again, and none before it.
    Mutant(
        "19",
        "a checkpoint does not wait for the reports before it",
        "consumers/training/session.py",
        """        await self.announcements.settled()
        # The snapshot's records""",
        """        # The snapshot's records""",
        (f"{TRAINING}/test_trainer_failures.py::test_a_checkpoint_waits_for_the_reports_and_rows_that_it_rests_on",),
    ),
    # The records of a snapshot are never read again, so a row that is lost after it leaves one without an outcome.
    Mutant(
        "20",
        "a checkpoint does not wait for its skip rows",
        "consumers/training/session.py",
        "        await self.reader.flush()\n",
        "",
        (f"{TRAINING}/test_trainer_failures.py::test_a_checkpoint_waits_for_the_reports_and_rows_that_it_rests_on",),
    ),
    # An audit believes that one more row of the parent counts than its checkpoint has.
    Mutant(
        "21",
        "one skip row too many of the parent counted",
        "consumers/training/session.py",
        "Ancestry(manifest.policy_version, manifest.skips.count, ",
        "Ancestry(manifest.policy_version, manifest.skips.count + 1, ",
        (f"{TRAINING}/test_trainer_failures.py::test_rows_of_the_parent_s_checkpoint_are_counted_in_the_first_report",),
    ),
    # A gradient that was not applied: its records are in no weights, and count as trained.
    Mutant(
        "22",
        "the records of a refused step marked as trained",
        "consumers/training/trainer.py",
        "            ledger.mark_skipped(group, SkipReason.FILTERED, outcome.problem)\n",
        "            ledger.mark_trained(sample.ref for sample in group.samples)\n",
        (
            f"{TRAINING}/test_trainer_failures.py::test_a_refused_step_names_its_records_and_the_next_one_counts_from_zero",
        ),
    ),
    # Retention deleted records, the user accepts that, and no topic says which they were.
    Mutant(
        "23",
        "an accepted loss leaves no row",
        "consumers/ingest/ledger.py",
        "            self.rejections.skip(ref, None, reason, detail, ",
        "            _ = (ref, None, reason, detail, ",
        (
            f"{INGEST}/test_ledger.py::test_a_lost_stretch_gets_a_row_for_each_part_that_was_not_finished",
            f"{INGEST}/test_opening.py::test_an_accepted_hole_gets_one_row_and_reading_continues_after_it",
        ),
    ),
    # Samples of one step more than the bound are trained.
    Mutant(
        "24",
        "staleness bound off by one",
        "consumers/ingest/filters.py",
        "        if age > self.max_staleness:\n",
        "        if age > self.max_staleness + 1:\n",
        (f"{INGEST}/test_staleness.py::test_a_trajectory_is_kept_up_to_the_bound_and_skipped_beyond_it",),
    ),
    # Entries come newest first, and the oldest are kept.
    Mutant(
        "25",
        "pruning drops the newest checkpoints",
        f"{STORAGE}/catalogue.py",
        "not chain.is_abandoned(entry.manifest)][:keep]",
        "not chain.is_abandoned(entry.manifest)][-keep:]",
        (f"{CHECKPOINTS}/test_catalogue.py::test_the_newest_are_kept_by_number",),
    ),
    # An orphan that got further than the lineage that took over leads.
    Mutant(
        "26",
        "checkpoints ordered by step alone",
        f"{STORAGE}/catalogue.py",
        "            return self.manifest.lineage, self.manifest.step\n",
        "            return 0, self.manifest.step\n",
        (
            f"{CHECKPOINTS}/test_catalogue.py::test_checkpoints_of_a_newer_lineage_are_kept",
            f"{CHECKPOINTS}/test_checkpoint.py::test_the_newest_lineage_is_restored_though_an_orphan_took_more_steps",
        ),
    ),
    # After an unknown outcome the transactional id is opened again, which fences whoever has taken over meanwhile.
    Mutant(
        "27",
        "the transactional id opened again blindly: without a look at the lineage",
        "consumers/training/announcer.py",
        """            await self.check()
            await self.elsewhere()
""",
        """            await self.elsewhere()
""",
        (f"{TRAINING}/test_announcer.py::test_a_newer_trainer_is_never_fenced_blindly",),
    ),
    # A trainer of another directory has claims of its own: only the topics tell of it.
    Mutant(
        "27b",
        "the transactional id opened again blindly: without a look at the topics",
        "consumers/training/announcer.py",
        "            await self.elsewhere()\n",
        "",
        (f"{TRAINING}/test_identity.py::test_a_fenced_trainer_asks_the_topics_before_it_opens_its_id_again",),
    ),
    # A power failure undoes the rename, when the checkpoint before is deleted already.
    Mutant(
        "28",
        "the checkpoint's directory not synced after the rename",
        f"{STORAGE}/storage.py",
        "        sync(self.root)\n        shutil.rmtree(aside",
        "        shutil.rmtree(aside",
        (f"{CHECKPOINTS}/test_local.py::test_the_old_checkpoint_goes_when_the_name_of_the_new_one_is_on_the_disk",),
    ),
    # The manifest is on the disk before the files that it names.
    Mutant(
        "29",
        "tensor files not synced",
        f"{STORAGE}/storage.py",
        '        """Sync the file."""\n        sync(staged)\n',
        '        """Sync the file."""\n',
        (f"{CHECKPOINTS}/test_local.py::test_a_checkpoint_gets_its_name_when_all_of_it_is_on_the_disk",),
    ),
    # A writer that stood still between the two renames goes on with the second.
    Mutant(
        "30",
        "no look at the lineage right before the rename",
        f"{STORAGE}/storage.py",
        "            fence()  # again: moving the old one aside may have taken long\n",
        "",
        (f"{CHECKPOINTS}/test_local.py::test_a_newer_checkpoint_is_never_overwritten",),
    ),
    # A superseded writer publishes its checkpoint.
    Mutant(
        "31",
        "no look at the lineage at all",
        f"{STORAGE}/store.py",
        "slot = self.storage.publish(slot, directory, manifest, lineage.check)",
        "slot = self.storage.publish(slot, directory, manifest, lambda: None)",
        (f"{CHECKPOINTS}/test_checkpoint.py::test_a_superseded_writer_publishes_nothing",),
    ),
    # Nor right before the manifest of an object store, which makes the uploaded files a checkpoint.
    Mutant(
        "31b",
        "no look at the lineage before the manifest in an object store",
        f"{STORAGE}/storage.py",
        "        content = encode_manifest(manifest)\n        fence()\n",
        "        content = encode_manifest(manifest)\n",
        (f"{CHECKPOINTS}/test_checkpoint.py::test_a_superseded_writer_publishes_nothing",),
    ),
    # A trainer that stood still since it claimed its lineage deletes what its successor has in hand.
    Mutant(
        "31c",
        "uploads of a newer lineage cleared",
        f"{STORAGE}/storage.py",
        "or (slot.lineage or 0) >= before or",
        "or",
        (f"{CHECKPOINTS}/test_objects.py::test_a_trainer_that_stood_still_clears_nothing_of_its_successor_s_upload",),
    ),
    Mutant(
        "31d",
        "what a newer lineage has in hand cleared in a directory",
        f"{STORAGE}/storage.py",
        "            if found is not None and int(found[2]) >= lineage:\n                continue\n",
        "",
        (
            f"{CHECKPOINTS}/test_local.py::test_files_of_a_newer_lineage_are_never_cleared_by_a_trainer_that_stood_still",
        ),
    ),
    # It has listed what may go, and another has written in one of these places meanwhile.
    Mutant(
        "31e",
        "old checkpoints forgotten without a look at the lineage",
        f"{STORAGE}/store.py",
        "                lineage.check()\n                self.storage.remove(slot)\n",
        "                self.storage.remove(slot)\n",
        (f"{CHECKPOINTS}/test_local.py::test_a_late_prune_removes_no_checkpoint_of_a_newer_trainer",),
    ),
    # Files of the right size are taken for the ones that were written.
    Mutant(
        "32",
        "sha256 of a checkpoint's files not verified",
        f"{STORAGE}/store.py",
        "if path.stat().st_size != file.size or sha256_of(path) != file.sha256:",
        "if path.stat().st_size != file.size:",
        (f"{CHECKPOINTS}/test_flipped_bytes.py::test_a_checkpoint_with_any_byte_of_any_file_changed_is_refused",),
    ),
    # A lineage is claimed twice in an object store, and nobody is told.
    Mutant(
        "33",
        "a claim in an object store overwrites another",
        f"{STORAGE}/storage.py",
        'obstore.put(self.store, key, content, mode="create")',
        'obstore.put(self.store, key, content, mode="overwrite")',
        (f"{CHECKPOINTS}/test_lineage.py::test_a_lineage_number_is_claimed_once",),
    ),
    # Some stores overwrite in silence where they were told to create.
    Mutant(
        "33b",
        "a store that overwrites is not found out",
        f"{STORAGE}/storage.py",
        "        if self._create(key, content):\n            raise",
        "        if self._create(key, content) and number < 0:\n            raise",
        (f"{CHECKPOINTS}/test_lineage.py::test_a_store_that_overwrites_what_it_should_only_create_is_refused",),
    ),
    # A topic that was deleted and filled anew is long enough, and its records are others.
    Mutant(
        "34",
        "known records not compared with the topic",
        "consumers/ingest/opening.py",
        "        if held:\n            await self._compare(held)\n",
        "",
        (f"{INGEST}/test_opening.py::test_a_recreated_topic_is_recognised_by_a_record_below_the_frontier",),
    ),
    # Groups are closed by the weights they were ordered for and no clock is asked; where one is, time in which nobody
    # could be heard must not count: not for the leases of workers.
    Mutant(
        "35",
        "our own silence counts for the leases of workers",
        "schemas/liveness.py",
        "            last.at += seconds\n",
        "            last.at += 0.0\n",
        ("tests/producers/dispatch/test_workers.py::test_a_pause_of_our_own_expires_no_lease",),
    ),
    # Nor does time in which the broker was away.
    Mutant(
        "35b",
        "a broker's silence counts for the leases of workers",
        "streamrl/bus/listening.py",
        "            self._give_back(self.clock() - self._heard_at)\n",
        "            pass\n",
        ("tests/producers/dispatch/test_dispatcher.py::test_a_broker_that_is_silent_costs_no_worker_its_orders",),
    ),
)
