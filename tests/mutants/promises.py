"""Bugs against other promises: whose run a name is, what strangers are given and shown, what watches a run."""

from tests.mutants.mutant import Mutant

TRAINING = "tests/consumers/training"

VALUE = "tests/producers/value"

PROMISES = (
    # Prompts that failed often enough are never ordered again, also when the policy could solve them.
    Mutant(
        "75",
        "exploration of prompts falls to nothing",
        "producers/value/estimates.py",
        "return max(LEAST_PROBABILITY, math",
        "return max(_EDGE, math",
        (
            f"{VALUE}/test_estimates.py::test_every_prompt_keeps_a_chance",
            f"{VALUE}/test_estimates.py::"
            "test_a_prompt_that_failed_in_every_group_is_ordered_with_the_least_probability",
        ),
    ),
    # Samples that are weighed by the inverse of the recorded probability are biased.
    Mutant(
        "75b",
        "the recorded probability is not the one that decides",
        "producers/value/estimates.py",
        ".random() < probability, chance)",
        ".random() < probability / 2, chance)",
        (
            f"{VALUE}/test_estimates.py::test_recorded_probability_decides",
            f"{VALUE}/test_estimates.py::test_the_share_of_positions_that_are_ordered_is_the_recorded_probability",
        ),
    ),
    # The same, of prompts that a killed dispatcher had chosen and not sent.
    Mutant(
        "75c",
        "a restarted dispatcher decides again",
        "producers/dispatch/state.py",
        "                self._decided_before[position] = probability\n",
        "                pass\n",
        (f"{VALUE}/test_chooser.py::test_a_prompt_that_was_chosen_and_not_sent_keeps_its_recorded_probability",),
    ),
    # Held-out rewards that raise are scored as 0 without a message.
    Mutant(
        "62",
        "failed rewards of held-out completions count for nothing",
        "producers/evaluation/evaluator.py",
        "                    self.failures.add(message)\n",
        "                    pass\n",
        (
            "tests/producers/evaluation/test_evaluator.py::"
            "test_held_out_rewards_that_fail_end_the_evaluation_with_their_reason",
        ),
    ),
    # An environment whose every step raises plays no episode, and the run waits for ever.
    Mutant(
        "61",
        "failed episodes do not count",
        "producers/environments/driver.py",
        "            self.in_a_row[name] += 1\n",
        "            self.in_a_row[name] += 0\n",
        ("tests/producers/environments/test_driver.py::test_an_environment_that_always_fails_ends_the_run",),
    ),
    # A run whose rewards are all equal skips every group and never takes a step.
    Mutant(
        "60",
        "a run that finds nothing to train waits for ever",
        "consumers/ingest/skip_streak.py",
        "        if self.groups >= self.end_after:\n",
        "        if self.groups > 1 << 40:\n",
        (
            "tests/consumers/ingest/test_skip_streak.py::test_a_run_that_finds_nothing_to_train_ends",
            f"{TRAINING}/test_trainer.py::"
            "test_a_trainer_whose_groups_all_have_equal_rewards_ends_and_every_row_is_written",
        ),
    ),
    # Whoever has the name trains what is on its topics.
    Mutant(
        "36",
        "the identity of a run not compared at its start",
        "consumers/training/identity.py",
        "    is_ours = there is None or moves_in or holds or takes_over\n",
        "    is_ours = True\n",
        (f"{TRAINING}/test_identity.py::test_differing_identities_give_one_line_with_the_ways_on",),
    ),
    # A directory that lost its checkpoints begins anew under the lineages that the topics have seen.
    Mutant(
        "36b",
        "lineages on the topics not compared with those of the directory",
        "consumers/training/identity.py",
        "    is_behind = start.topics.lineage > known or not _knows_claim(start)\n",
        "    is_behind = start.topics.lineage > known > 0 or not _knows_claim(start)\n",
        (f"{TRAINING}/test_identity.py::test_differing_identities_give_one_line_with_the_ways_on",),
    ),
    # A run that was adopted without a checkpoint trains the samples of the life before.
    Mutant(
        "37",
        "a run adopted without giving up what its earlier life sampled",
        "consumers/training/identity.py",
        "    orphans = before.orphans_through if has_progress else lineage\n",
        "    orphans = before.orphans_through\n",
        (
            f"{TRAINING}/test_identity.py::"
            "test_an_adopted_run_begins_above_all_lineages_and_trains_nothing_of_the_earlier_life",
            f"{TRAINING}/test_identity.py::test_a_run_continues_if_identities_agree_or_adoption_is_ordered",
        ),
    ),
    # Two places of checkpoints give the same number to two trainers of one run.
    Mutant(
        "53",
        "a lineage not claimed on the topic",
        "consumers/training/session.py",
        "    await keeper.claim(lineage.number, lineage.claim_id)\n",
        "",
        (f"{TRAINING}/test_identity.py::test_a_run_of_before_identities_goes_on_and_gets_one",),
    ),
    Mutant(
        "53b",
        "claims of a lineage compared by their numbers",
        "consumers/training/identity.py",
        "there.claim_id == held.claim_id:\n",
        "there.lineage <= held.lineage:\n",
        (f"{TRAINING}/test_identity.py::test_a_lineage_number_is_claimed_once_per_run",),
    ),
    # Another directory has taken the run over between the look and the claim.
    Mutant(
        "53c",
        "the control topic not compared before a claim is put on it",
        "consumers/training/identity.py",
        "            if found != before:\n                return False\n",
        "",
        (f"{TRAINING}/test_identity.py::test_a_run_adopted_while_a_lineage_is_claimed_gives_no_number_twice",),
    ),
    # The node that is asked was cut off, and does not know what the others have taken.
    Mutant(
        "53d",
        "the control topic read from a node that lags behind",
        "consumers/training/identity.py",
        "            if topics.end > mark.offset:\n",
        "            if topics.end >= 0:\n",
        (f"{TRAINING}/test_identity.py::test_a_lagging_node_is_waited_for_before_a_lineage_is_claimed",),
    ),
    # The lease of a worker whose clock is behind is over when it begins.
    Mutant(
        "38",
        "a time-out judged by the sender's clock",
        "producers/dispatch/fleet.py",
        "self._beats.observe(heartbeat.worker_id, heartbeat, at)",
        "self._beats.observe(heartbeat.worker_id, heartbeat, heartbeat.sent_at)",
        ("tests/producers/dispatch/test_workers.py::test_a_worker_is_there_until_its_lease_ends",),
    ),
    # The processes of a run under way read what a refused start wrote, when they are started again.
    Mutant(
        "39",
        "a refused start writes the configuration",
        "deploy/local/run.py",
        "        broker = broker_for(settings.kafka.bootstrap_servers, print_at_once, directory.kafka)\n",
        """        directory.create()
        directory.write_config(as_toml(settings))
        broker = broker_for(settings.kafka.bootstrap_servers, print_at_once, directory.kafka)
""",
        ("tests/deploy/local/test_refused_start.py::test_a_second_start_of_a_running_run_changes_no_file",),
    ),
    # The resolved file shall give the same run again, and has the password in it.
    Mutant(
        "40",
        "secrets written into the resolved configuration",
        "streamrl/settings/loading.py",
        "            tree[name] = value\n",
        "            tree[name] = part.get_secret_value() if hasattr(part, 'get_secret_value') else value\n",
        ("tests/settings/test_loading.py::test_no_secret_is_written",),
    ),
    # What a model wrote is judged, or run, beside the passwords of the worker.
    Mutant(
        "41",
        "reward processes inherit the worker's environment",
        "producers/rewards/runner.py",
        "environment_for(os.environ, settings.environment_of(function))",
        "dict(os.environ)",
        (
            "tests/producers/rewards/test_sandbox.py::"
            "test_reward_processes_get_no_secrets_and_only_variables_that_programs_need_or_the_user_names",
        ),
    ),
    # A backward pass broke off in the middle, and what it had added stays when the halves are added.
    Mutant(
        "42",
        "a retry for lack of memory keeps the partial gradient",
        "consumers/training/trainer.py",
        "            must_restart = shortage.gradient_lost\n",
        "            must_restart = False\n",
        (
            f"{TRAINING}/test_out_of_memory.py::"
            "test_a_micro_batch_that_does_not_fit_is_split_and_the_step_is_the_same_and_replays_bit_equal",
        ),
    ),
    # A run of which no prompt can be sampled spins for ever.
    Mutant(
        "43",
        "refused prompts not counted by the breaker",
        "consumers/ingest/filters.py",
        "            self._refused.failed(refused[0].detail)\n",
        "            self._refused.good()\n",
        (
            "tests/consumers/ingest/test_breaker.py::"
            "test_refused_prompts_are_skipped_by_that_name_and_all_of_them_end_the_trainer",
        ),
    ),
    # Of a topic that was made anew, the record at the indexed offset is shown as the one that was asked for.
    Mutant(
        "44",
        "the record index trusts an offset without a look at the name",
        "streamrl/inspection/replay/history.py",
        "        if (found := peek_trajectory_id(record.value, record.headers)) != name:\n",
        "        if (found := peek_trajectory_id(record.value, record.headers)) is None:\n",
        ("tests/observability/record_index/test_following.py::test_the_index_is_never_trusted",),
    ),
    # Records whose step was undone stay settled, so that the audit calls them trained.
    Mutant(
        "45",
        "the continuous audit does not unpack what a crash undid",
        "streamrl/inspection/audit/settling.py",
        "                found.add(number)\n",
        "                continue\n",
        (
            "tests/inspection/audit/test_follower.py::"
            "test_settling_changes_no_verdict_and_a_crash_unpacks_what_it_undid",
        ),
    ),
    # Copies move up from the newest on, so that the first of them goes over all others.
    Mutant(
        "46",
        "log rotation loses all copies but one",
        "deploy/local/logs.py",
        "            for newer, older in reversed(list(pairwise(copies))):\n",
        "            for newer, older in pairwise(copies):\n",
        ("tests/deploy/local/test_logs.py::test_so_many_copies_are_kept_the_newest_first",),
    ),
    # Colours shall be seen, and with them a completion moves the cursor.
    Mutant(
        "47",
        "escape sequences of strangers reach the terminal",
        "schemas/plain_text.py",
        "each if each.isprintable() or each in keep else",
        'each if each.isprintable() or each in keep or each == "\\x1b" else',
        (
            "tests/schemas/test_plain_text.py::test_control_characters_are_written_out",
            "tests/schemas/test_plain_text.py::test_printed_text_cannot_control_the_terminal",
        ),
    ),
    # A file of the right length is adopted whatever its bytes are.
    Mutant(
        "48",
        "workers adopt weights without verifying them",
        "streamrl/weights/fetch.py",
        "    if have != file.size or found != file.sha256:\n",
        "    if have != file.size:\n",
        (
            "tests/weights/test_fetch_and_adopt.py::"
            "test_a_corrupted_file_is_refused_and_fetched_again_while_the_old_weights_serve",
        ),
    ),
    # A file put together of a base and deltas is adopted whatever came of it.
    Mutant(
        "48b",
        "what deltas make of a file not compared with the announced one",
        "streamrl/weights/fetch.py",
        "            if found != target.sha256:\n",
        "            if not found:\n",
        ("tests/weights/test_shared_weights.py::test_a_version_in_the_cache_is_whole_or_thrown_away",),
    ),
    # A worker deletes a version that another one has not read yet.
    Mutant(
        "48c",
        "weights deleted that another worker of the host uses",
        "streamrl/weights/cache.py",
        "        elif (descriptor := _lock(directory, fcntl.LOCK_EX)) is not None:\n",
        "        elif (descriptor := _lock(directory, fcntl.LOCK_SH)) is not None:\n",
        ("tests/weights/test_shared_weights.py::test_versions_in_use_are_not_deleted",),
    ),
    # A relay passes on whatever arrives; only the last host would find out, from the sha256.
    Mutant(
        "48d",
        "chunks of weights not checked before they are passed on",
        "schemas/weights.py",
        '        return bool(expected) and expected != f"{zlib.crc32(chunk):08x}"\n',
        "        return False\n",
        ("tests/weights/test_relay_tier.py::test_damage_is_found_at_once_and_only_verified_chunks_are_forwarded",),
    ),
    # Two relays may wait for each other.
    Mutant(
        "48e",
        "relays fetch from those behind them, too",
        "streamrl/weights/relay/chain.py",
        "    holders = [member for member in chain[place + 1 :] if member.holds(version, series)]\n",
        "    holders = chain[place + 1 :]\n",
        ("tests/weights/test_relay_chain.py::test_relays_never_wait_for_each_other",),
    ),
    # A node that is cut off is waited for again and again, though others answer.
    Mutant(
        "54",
        "a silent node asked for metadata as often as any",
        "streamrl/bus/kafka/aiokafka_internals.py",
        "sorted(nodes, key=silent.__contains__)",
        "nodes",
        (
            "tests/bus/kafka/test_aiokafka_internals.py::"
            "test_a_node_that_is_silent_is_given_up_soon_and_asked_last_until_it_answers",
        ),
    ),
    # The dashboard shows the fate that a crash has undone meanwhile.
    Mutant(
        "55",
        "what all steps say kept though another process has written",
        "streamrl/observability/record_index/store.py",
        '(database.execute("PRAGMA data_version").fetchone()[0], database.total_changes)',
        "(0, database.total_changes)",
        (
            "tests/observability/record_index/test_store.py::"
            "test_queries_over_all_steps_are_cached_until_any_process_writes",
        ),
    ),
    # A relay ends with its upstream.
    Mutant(
        "48f",
        "no other upstream asked when a connection breaks",
        "streamrl/weights/relay/transfer.py",
        "(WeightsError, aiohttp.ClientError, HTTPException, EOFError, ConnectionError)",
        "(WeightsError, aiohttp.ClientError, HTTPException, ConnectionError)",
        ("tests/weights/test_relay_tier.py::test_a_dead_relay_is_routed_around_in_the_middle_of_a_transfer",),
    ),
    # Workers of other hosts get the served policy's weights under an arm's name, or none.
    Mutant(
        "48g",
        "the served policy's weights asked for in place of an arm's",
        "streamrl/weights/relay/transfer.py",
        "{weights_path(self.ready.series)}",
        "{weights_path()}",
        ("tests/weights/test_relay_tier.py::test_damaged_weights_of_an_arm_are_not_passed_on",),
    ),
    # Hosts with memory of an earlier run of that name fetch nothing, and send their workers to the store.
    Mutant(
        "48h",
        "what another run left taken for this one's",
        "streamrl/weights/relay/copies.py",
        "                copies.versions.clear()\n",
        "                pass\n",
        ("tests/weights/test_relay_tier.py::test_copies_belong_to_one_run",),
    ),
    # A reader and an open file more for each attempt that came to nothing.
    Mutant(
        "48i",
        "readers left waiting for what nobody brings",
        "streamrl/weights/relay/copies.py",
        "            arriving.give_up()\n",
        "            pass\n",
        ("tests/weights/test_relay_tier.py::test_readers_of_an_abandoned_version_are_notified",),
    ),
    Mutant(
        "48j",
        "a linked file adopted unchecked",
        "streamrl/weights/cache.py",
        " or sha256_of(aside) != file.sha256:",
        ":",
        ("tests/weights/test_shared_weights.py::test_weights_that_cannot_be_linked_are_fetched",),
    ),
    Mutant(
        "48k",
        "a version of another run waited for because its number is larger",
        "streamrl/weights/relay/following.py",
        "wanted is None or (wanted.version, wanted.manifest_sha256) != (ready.version, ready.manifest_sha256)\n",
        "wanted is not None and wanted.version > ready.version\n",
        ("tests/weights/test_relay_tier.py::test_a_version_of_another_run_that_came_half_is_not_waited_for",),
    ),
    Mutant(
        "48l",
        "a worker that waits for files it cannot link",
        "streamrl/weights/cache.py",
        "        return below is None or os.stat(unquote(below)).st_dev == directory.stat().st_dev\n",
        "        return below is None or bool(os.stat(unquote(below)))\n",
        ("tests/weights/test_relay_tier.py::test_a_worker_that_cannot_map_the_files_of_its_relay_reads_what_arrives",),
    ),
    Mutant(
        "48m",
        "a cache in which another run's versions stay above all newer ones",
        "streamrl/weights/cache.py",
        "            _delete_unused(root, lambda version: True)\n",
        "            _delete_unused(root, lambda version: version is None)\n",
        ("tests/weights/test_shared_weights.py::test_another_run_of_the_same_name_removes_all_unused_weights",),
    ),
    # A completion has tokens of two policies, and says that it has those of one.
    Mutant(
        "56",
        "another policy's weights taken while completions run",
        "streamrl/weights/adopt.py",
        "        return self.only_idle or ready.series != self.series\n",
        "        return self.only_idle\n",
        ("tests/weights/test_fetch_and_adopt.py::test_no_completion_mixes_two_policies",),
    ),
    Mutant(
        "56a",
        "what another policy's weights sampled gone on with",
        "producers/generation/partials.py",
        "(chunk.prompt_hash, chunk.policy) == wanted)",
        "(chunk.prompt_hash, order.policy) == wanted)",
        (
            "tests/producers/generation/test_partials.py::test_a_half_done_completion_of_another_policy_is_not_continued",
        ),
    ),
    # The step that it has a checkpoint of is never reported.
    Mutant(
        "56b",
        "an instance ended well behind the run at any error of the broker",
        "streamrl/policies/following_trainer.py",
        "(error is None or (isinstance(error, BusError) and await self._is_gone(control))):\n",
        "(error is None or isinstance(error, BusError)):\n",
        (
            "tests/policies/test_following_trainer.py::"
            "test_an_error_after_the_runs_end_restarts_the_instance_while_its_broker_answers",
        ),
    ),
    # Whoever goes on samples the last tokens once more, and another's stay unread.
    Mutant(
        "49",
        "an order let go before its last tokens are on record",
        "producers/generation/releases.py",
        "        await asyncio.gather(*map(_write, kept.values()))\n",
        "",
        ("tests/producers/generation/test_releases.py::test_released_samples_are_recorded_first",),
    ),
    # A sample that is whole, and on its way, is sampled again elsewhere.
    Mutant(
        "49b",
        "a group ordered again while some of it is still with the worker that let go",
        "producers/dispatch/fleet.py",
        "            if flight.order.attempt == released.attempt and flight.missing <= samples:\n",
        "            if flight.order.attempt == released.attempt:\n",
        ("tests/producers/dispatch/test_moving.py::test_whole_samples_are_waited_for_and_not_ordered_again",),
    ),
    # A worker of the tail with a full batch is as slow as those that were to be relieved.
    Mutant(
        "49c",
        "tails put together without heed of limits",
        "producers/dispatch/repack.py",
        "        if self.samples > self.limit:\n",
        "        if not self.samples:\n",
        ("tests/producers/dispatch/test_repack.py::test_targets_stay_within_their_limits",),
    ),
    # Tails go slower beside one another, and whoever was released for it stands idle: a bound trainer waits for both.
    Mutant(
        "49e",
        "workers released although no prompt may begin",
        "producers/dispatch/repack.py",
        "        moves = repack(workers, self.payback, self._room())\n",
        "        moves = repack(workers, self.payback, 1e9)\n",
        ("tests/producers/dispatch/test_moving.py::test_nothing_is_taken_back_while_no_prompt_may_begin",),
    ),
    # A group that was moved often enough is thrown away as one that kills its workers.
    Mutant(
        "49d",
        "moves counted as failed orders",
        "producers/dispatch/fleet.py",
        "        return self.order.attempt - self.order.moves\n",
        "        return self.order.attempt\n",
        (
            "tests/producers/dispatch/test_moving.py::"
            "test_a_target_that_is_lost_first_is_not_waited_for_and_moves_are_no_failures",
        ),
    ),
    # A reward that takes a minute, or a dispatcher that starts again: what was let go of beside it is sampled again.
    Mutant(
        "49f",
        "what was let go of settled before another order says where it is",
        "producers/dispatch/fleet.py",
        "not flight.missing or flight.order.attempt > released.attempt:\n",
        "not flight.missing or flight.order.attempt >= released.attempt:\n",
        ("tests/producers/dispatch/test_moving.py::test_a_release_is_settled_once_another_order_names_its_place",),
    ),
    # Heartbeats name it for ever, and its tokens hold back where the worker's records begin.
    Mutant(
        "49g",
        "what was let go of kept for ever",
        "producers/generation/worker.py",
        "        self.releases.settle(release.settled)\n",
        "",
        ("tests/producers/generation/test_releases.py::test_released_orders_are_kept_until_settled",),
    ),
    # A target that took new prompts since the plan runs more than its cache holds.
    Mutant(
        "49h",
        "a group moved to a target that has no room for it any more",
        "producers/dispatch/repack.py",
        "        return worker if packed.is_within_limits else None\n",
        "        return worker\n",
        (
            "tests/producers/dispatch/test_moving.py::test_a_target_takes_as_many_groups_as_it_has_room_for",
            "tests/producers/dispatch/test_moving.py::"
            "test_a_target_that_has_taken_new_work_and_has_no_room_is_passed_over",
        ),
    ),
    # It is on the topic, and another worker delivers it once more.
    Mutant(
        "49i",
        "a sample cancelled on its way to the broker and let go",
        "producers/generation/worker.py",
        "if group_id_of(name) == group_id and not self._is_sampled(name)]\n",
        "if group_id_of(name) == group_id]\n",
        ("tests/producers/generation/test_releases.py::test_one_worker_has_a_sample",),
    ),
    Mutant(
        "49j",
        "an order taken back two turns after its samples were found at work",
        "producers/generation/worker.py",
        "            releasing = tasks.create_task(self.releases.take_back(group_id, attempt, own, logs))\n",
        "            async def later(*taken: Any) -> None:\n"
        "                await asyncio.sleep(0)\n"
        "                await self.releases.take_back(*taken)\n\n"
        "            releasing = tasks.create_task(later(group_id, attempt, own, logs))\n",
        (
            "tests/producers/generation/test_releases.py::"
            "test_a_sample_that_ends_during_its_release_is_released_or_delivered",
        ),
    ),
    # Its samples are taken for those that are leaving, and nobody samples them.
    Mutant(
        "49k",
        "a later attempt begun while an earlier one is let go of",
        "producers/generation/worker.py",
        "        if any(group_id == order.group_id for group_id, _ in self._releasing):\n",
        "        if any(not group_id for group_id, _ in self._releasing):\n",
        ("tests/producers/generation/test_releases.py::test_a_later_attempt_during_a_release_starts_after_it",),
    ),
    # The worker that had a group before it was moved is waited for, and then another samples it once more.
    Mutant(
        "49l",
        "a restarted dispatcher goes by the order that it reads last",
        "producers/dispatch/state.py",
        "is not None and flight.order.attempt > order.attempt:\n",
        "is not None and flight.order.attempt > order.attempt + 64:\n",
        ("tests/producers/dispatch/test_recovery.py::test_a_later_attempt_replaces_the_earlier_one",),
    ),
    # All that others wrote in its partition is read for nothing.
    Mutant(
        "49m",
        "a worker that wrote nothing yet says that its records begin where the partition does",
        "producers/generation/worker.py",
        "            await self.executor.partials.open()\n",
        "            pass\n",
        ("tests/producers/generation/test_partials.py::test_chunks_of_a_worker_are_looked_for_only_after_its_start",),
    ),
    # A gateway that stops closes its database under a thread that writes to it, and dies of SIGSEGV.
    Mutant(
        "57",
        "a cancellation that does not wait for the thread of the call",
        "streamrl/bus/waiting.py",
        "        await wait_for_tasks([made], on_cancel=drop)\n",
        "        await asyncio.shield(made)\n",
        (
            "tests/bus/test_threads.py::test_a_cancelled_call_waits_for_its_thread",
            "tests/producers/gateway/test_feedback.py::test_the_store_closes_after_its_last_operation",
        ),
    ),
    # The same crash by another way: two threads on one connection.
    Mutant(
        "57b",
        "the file of feedback closed without waiting for what was accepted",
        "producers/gateway/feedback.py",
        "            await self._write()\n        finally:\n",
        "            await asyncio.sleep(0)\n        finally:\n",
        ("tests/producers/gateway/test_feedback.py::test_the_store_closes_after_its_last_operation",),
    ),
    # Of two engines that start at once, one takes the patch away under the other, whose processes know no engine.
    Mutant(
        "58",
        "multiprocessing's own process put back by the first engine that has started",
        "producers/generation/engines/vllm_group.py",
        "            _STARTING.reset(token)\n",
        "            _STARTING.reset(token)\n            context.SpawnContext.Process = context.SpawnProcess\n",
        ("tests/producers/generation/engines/test_vllm_group.py::test_engines_that_start_together_do_not_mix",),
    ),
    # Of two episodes that run at once, one plays with the other's key.
    Mutant(
        "58b",
        "keys of all sessions in one variable of the process's environment",
        "producers/environments/adapters.py",
        """    name = f"{_KEY_VARIABLE}_{sha256(key.encode()).hexdigest()[:16].upper()}"\n""",
        "    name = _KEY_VARIABLE\n",
        (
            "tests/producers/environments/test_adapters.py::"
            "test_episodes_that_run_at_once_have_each_the_key_of_its_own_session",
        ),
    ),
    # A process that dies of SIGSEGV while it is stopped is taken for one that ended well.
    Mutant(
        "59",
        "the exit code of a process that was asked to end is not looked at",
        "deploy/local/supervisor.py",
        "        elif crash := child.crash(code):\n",
        "        elif crash := child.crash(0):\n",
        ("tests/deploy/local/test_supervisor.py::test_a_crash_while_stopping_is_reported",),
    ),
    # A trainer that a cluster evicts counts as one that has finished the run.
    Mutant(
        "59b",
        "a role that SIGTERM ended returns 0",
        "deploy/wiring/process.py",
        "    return stopping.exit_code() if asked else 0\n",
        "    return 0\n",
        ("tests/deploy/local/test_shutdown.py::test_sigterm_drains_every_process_within_its_grace_period",),
    ),
    # A command that is stopped while it imports goes on, and prints a traceback of the callback that met the signal.
    Mutant(
        "59c",
        "an interrupt that a callback swallows is not raised again",
        "schemas/stopping.py",
        "    sys.unraisablehook = _raise_again\n",
        "    pass\n",
        ("tests/schemas/test_stopping.py::test_an_interrupt_swallowed_by_a_callback_is_raised_again",),
    ),
    # A trainer that is stopped while it loads torch aborts.
    Mutant(
        "59d",
        "an import is interrupted in its middle",
        "schemas/stopping.py",
        "    return is_importing and time",
        "    return False and time",
        ("tests/schemas/test_stopping.py::test_a_module_that_is_being_imported_is_not_interrupted",),
    ),
)
