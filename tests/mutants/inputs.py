"""Bugs that make a run learn something else than what its owner gave: data, tokens, rewards, and what is said of them.

None of them raises. Each trains on other values, leaves something out, or hides that a run cannot succeed.
"""

from tests.mutants.mutant import Mutant

PROMPTS, REWARDS, TOKENS = "tests/producers/prompts", "tests/producers/rewards", "tests/producers/generation"
DRY_RUN, RESULTS = "tests/streamrl/init/test_dry_run.py", "tests/producers/evaluation/test_results.py"
CHECK = "tests/deploy/local/test_task_check.py"
TABLES, TEXT_TABLES = "producers/prompts/tables.py", "producers/prompts/text_tables.py"
TOKENIZER, MATHEMATICS = "producers/generation/tokenizer.py", "producers/rewards/mathematics.py"

INPUTS = (
    # The library keeps columns of mixed types as JSON text, so an answer of 7 becomes "7" and a list its text.
    Mutant(
        "63",
        "stored values taken for the values of a row",
        TABLES,
        "row: Row = self._features.decode_example(self._dataset[index : index + 1].to_pylist()[0])",
        "row: Row = self._dataset[index : index + 1].to_pylist()[0]",
        (f"{PROMPTS}/test_containers.py::test_columns_that_the_library_stores_as_json_text_are_values",),
    ),
    # The same lines give other values in a directory than in a file.
    Mutant(
        "63b",
        "text files of a directory read by the library, which guesses types",
        TABLES,
        "    if (files := _text_files(datasets, builder, path)) is not None:\n"
        "        return _text_split(files, split, name)\n"
        "    builder.download_and_prepare()\n"
        "    dataset = builder.as_dataset(split=split)\n",
        "    builder.download_and_prepare()\n    return ArrowTable(builder.as_dataset(split=split), path, name)\n",
        (f"{PROMPTS}/test_tables.py::test_csv_files_of_a_directory_are_read_as_written_with_its_own_separator",),
    ),
    # 2x+1 is read as 2, and (2, -3) as -3: part of an answer earns the reward of all of it.
    Mutant(
        "64",
        "only expected answers with a backslash are read as a whole",
        MATHEMATICS,
        "    read = read_whole(core)\n    if read is None or",
        '    read = read_whole(core) if "\\\\" in core else next(iter(_parsed(core)), None)\n    if read is None or',
        (
            f"{REWARDS}/builtin/test_golds.py::test_a_part_of_an_answer_is_another_answer",
            f"{REWARDS}/builtin/test_golds.py::test_a_formula_is_no_part_of_it_and_no_other_of_its_form",
        ),
    ),
    # A row of Countdown pays for the last number in the text of its mapping.
    Mutant(
        "64b",
        "answers that are mappings or truth values compared as their text",
        "producers/rewards/answers.py",
        "        if isinstance(one, bool) or not isinstance(one, str | int | float | None):\n",
        "        if isinstance(one, set):\n",
        (f"{REWARDS}/builtin/test_golds.py::test_answers_that_are_neither_text_nor_number_are_refused_by_name",),
    ),
    Mutant(
        "64c",
        "a mapping as answer accepted where a built-in reward compares it",
        "producers/prompts/columns.py",
        "        if not wrong:\n",
        "        if not wrong or isinstance(wrong[0], Mapping):\n",
        (
            f"{PROMPTS}/test_columns.py::"
            "test_a_mapping_is_an_answer_for_own_rewards_and_refused_where_a_built_in_one_would_compare_it",
        ),
    ),
    # One blank cell turns every integer of its column into 84.0, and 007 becomes 7.
    Mutant(
        "65",
        "types of csv columns are guessed",
        TEXT_TABLES,
        "        column_types=dict.fromkeys(names, pyarrow.string()),\n",
        "        column_types={},\n",
        (f"{PROMPTS}/test_containers.py::test_text_stays_text_in_cells",),
    ),
    Mutant(
        "65b",
        "words such as NA in a csv file are no answer",
        TEXT_TABLES,
        '        null_values=[""],\n',
        '        null_values=["", "NA", "None", "null", "nan"],\n',
        (f"{PROMPTS}/test_containers.py::test_csv_that_other_libraries_write_is_read_as_written",),
    ),
    # 84.0 and 84.00 are other texts than the 84 that its owner wrote.
    Mutant(
        "65c",
        "answers that are floats become some text",
        "producers/prompts/columns.py",
        "    return isinstance(value, str | int) and not isinstance(value, bool)\n",
        "    return isinstance(value, str | int | float) and not isinstance(value, bool)\n",
        (f"{PROMPTS}/test_columns.py::test_answers_keep_their_written_form_or_are_named_by_row_and_type",),
    ),
    # Answers that no completion can give look as if they were paid.
    Mutant(
        "66",
        "the dry run compares an answer with itself",
        "producers/rewards/trial.py",
        "    written = [writer(text) for text in texts]\n",
        "    written = [made_up(text) for text in texts]\n",
        (
            f"{DRY_RUN}::test_answers_that_no_completion_can_give_fail",
            f"{DRY_RUN}::test_a_stop_string_that_cuts_an_answer_off_is_seen",
        ),
    ),
    Mutant(
        "66b",
        "for the dry run one row that is paid for its answer is enough",
        "streamrl/init/reward_checks.py",
        "    unpaid = [prompt_id for prompt_id in trial.unpaid if prompt_id in answered]\n",
        "    unpaid = [one for one in trial.unpaid if one in answered and len(trial.unpaid) == trial.rows]\n",
        (f"{DRY_RUN}::test_answers_that_no_completion_can_give_fail",),
    ),
    Mutant(
        "66c",
        "the dry run tries no row's answer on another row",
        "producers/rewards/trial.py",
        "written[index], None if other is None else written[other]))",
        "written[index], None))",
        (f"{DRY_RUN}::test_rows_are_paid_for_their_own_answer_and_for_another_rows_and_shown",),
    ),
    # A data set whose answers no reward reads is found after 51 trajectories.
    Mutant(
        "66d",
        "rewards that fail on every row are found in the run alone",
        "deploy/local/task_check.py",
        "    return trial.lost_share > settings.ingest.max_unrewarded_share\n",
        "    return trial.lost_share > 1 + settings.ingest.max_unrewarded_share\n",
        (
            f"{DRY_RUN}::test_answers_that_are_no_mathematics_fail_at_the_start",
            f"{CHECK}::test_a_reward_that_scores_nothing_is_refused_and_one_that_sometimes_fails_is_not",
        ),
    ),
    # Completions run to the limit, and are trained on what follows their end.
    Mutant(
        "67",
        "only generation_config and config name the end of a completion",
        "producers/generation/vocabulary.py",
        '        "tokenizer": getattr(tokenizer, "eos_token_id", None),\n',
        '        "tokenizer": None,\n',
        (
            f"{TOKENS}/test_vocabulary.py::test_every_named_end_ends_a_completion",
            f"{TOKENS}/test_vocabulary.py::test_the_tokenizers_end_counts_for_engines_and_for_text",
        ),
    ),
    Mutant(
        "67b",
        "special tokens cut out before stop strings are looked for",
        TOKENIZER,
        "        return self._decoder_without(hidden.keys() - shown)\n",
        "        return self._decoder_without(hidden.keys())\n",
        (f"{TOKENS}/test_tokenizer.py::test_stop_strings_may_be_special_tokens_and_rewards_may_see_them",),
    ),
    Mutant(
        "67c",
        "nothing is said of a model without an end",
        "streamrl/init/preflight.py",
        "    notes = [] if facts.ends.ids or settings.loop.stop else [never_ends(settings)]\n",
        "    notes: list[str] = []\n",
        (f"{DRY_RUN}::test_ends_are_shown_and_a_model_without_one_is_noted",),
    ),
    Mutant(
        "67d",
        "special tokens cut from what rewards see although a setting keeps them",
        TOKENIZER,
        "        hidden = self._no_text if sampling.skip_special_tokens else self.ends.texts\n",
        "        hidden = self._no_text\n",
        (f"{TOKENS}/test_tokenizer.py::test_stop_strings_may_be_special_tokens_and_rewards_may_see_them",),
    ),
    # The model never sees which call the tool answers.
    Mutant(
        "68",
        "tool_calls and other keys of a turn dropped",
        "schemas/trajectories.py",
        '    model_config = ConfigDict(extra="allow")\n    __pydantic_extra__: dict[str, JsonValue]\n',
        '    model_config = ConfigDict(extra="ignore")\n',
        (
            f"{TOKENS}/test_tokenizer.py::"
            "test_a_conversation_is_rendered_whole_or_refused_by_the_part_that_the_template_leaves_out",
        ),
    ),
    Mutant(
        "68b",
        "a row's tools not described to the model",
        TOKENIZER,
        "        token_ids = self.encode_chat(turns, prompt.tools)\n",
        "        token_ids = self.encode_chat(turns)\n",
        (
            f"{TOKENS}/test_tokenizer.py::"
            "test_a_conversation_is_rendered_whole_or_refused_by_the_part_that_the_template_leaves_out",
        ),
    ),
    Mutant(
        "68c",
        "a part that the chat template leaves out is no reason to refuse a prompt",
        TOKENIZER,
        "            return self.encode_chat(turns, tools) == token_ids\n",
        "            return self.encode_chat(turns, tools) == token_ids and not turns\n",
        (
            f"{TOKENS}/test_tokenizer.py::"
            "test_a_conversation_is_rendered_whole_or_refused_by_the_part_that_the_template_leaves_out",
        ),
    ),
    Mutant(
        "68d",
        "a last turn of the assistant closed, and a second one opened",
        TOKENIZER,
        '        continues = turns[-1].get("role") == "assistant"\n',
        "        continues = False\n",
        (f"{TOKENS}/test_chat_templates.py::test_a_last_turn_of_the_assistant_is_continued",),
    ),
    Mutant(
        "68e",
        "a second beginning-of-sequence token before a text that has one",
        TOKENIZER,
        "return plain if not plain or plain[: len(opening)] == opening else opening + plain",
        "return opening + plain",
        (f"{TOKENS}/test_chat_templates.py::test_a_text_that_starts_with_the_opening_gets_no_second_one",),
    ),
    Mutant(
        "68f",
        "a wording of texts ignored where prompts are conversations",
        "producers/prompts/sources.py",
        "    if settings.prompt_template != PLACEHOLDER:\n",
        "    if PLACEHOLDER not in settings.prompt_template:\n",
        (f"{PROMPTS}/test_entries.py::test_a_setting_that_a_conversation_makes_meaningless_is_refused_by_name",),
    ),
    Mutant(
        "68g",
        "turns that a file holds as JSON text sent as that text",
        "producers/prompts/conversations.py",
        "        if not _LIKE_TURNS.match(prompt) and not _has_turns(prompt):\n",
        "        if prompt:\n",
        (f"{PROMPTS}/test_conversations.py::test_turns_as_json_text_are_turns_and_any_other_text_is_text",),
    ),
    Mutant(
        "68h",
        "template variables of a held-out set accepted and never read",
        "producers/evaluation/role.py",
        "        if held_out.chat_template_kwargs != settings.data.chat_template_kwargs:\n",
        "        if held_out.chat_template_kwargs is None:\n",
        (
            "tests/producers/evaluation/test_role.py::"
            "test_template_variables_of_a_set_of_its_own_are_refused_since_no_worker_would_read_them",
        ),
    ),
    Mutant(
        "68i",
        "rewards get the prompt with the wording of the settings",
        "producers/rewards/runner.py",
        "    stated = prompt.content if prompt.stated is None else prompt.stated\n",
        "    stated = prompt.content\n",
        (f"{REWARDS}/test_runner.py::test_a_reward_gets_the_prompt_as_the_data_has_it",),
    ),
    # A row that no order can carry ends the run when its turn comes.
    Mutant(
        "69",
        "rows are not checked by the limits of orders when the data is opened",
        "producers/prompts/sources.py",
        "                self._prompt(index, content, columns)\n            except",
        "                pass\n            except",
        (f"{PROMPTS}/test_stored.py::test_a_row_that_cannot_be_sent_is_left_out",),
    ),
    Mutant(
        "69b",
        "token ids above the model's are not looked for before a run",
        "producers/generation/prompt_survey.py",
        "            refuse_unknown(token_ids, vocab_size)\n",
        "",
        (f"{DRY_RUN}::test_a_tokenizer_larger_than_the_model_is_noted_and_prompts_with_its_tokens_are_refused",),
    ),
    # The format alone passes: pass@1 of 1 with every answer wrong.
    Mutant(
        "70",
        "a held-out completion passes as soon as one reward is full",
        "producers/evaluation/results.py",
        "sum(positive.values()) if passes_at is None else passes_at)",
        "1.0 if passes_at is None else passes_at)",
        (f"{RESULTS}::test_a_completion_passes_by_all_rewards_by_a_named_one_or_by_their_sum",),
    ),
    Mutant(
        "70b",
        "a bound that the format alone reaches accepted",
        "producers/evaluation/role.py",
        "    elif len(forms) < len(weights) and (form",
        "    elif len(forms) > len(weights) and (form",
        ("tests/producers/evaluation/test_role.py::test_a_completion_of_the_right_format_alone_passes_nowhere",),
    ),
    # 4 what is streamed, and 4 wh is recorded.
    Mutant(
        "71",
        "a stream sends the rest of the token that has a stop string",
        "producers/gateway/text.py",
        "        known = shown_text(self._settled, FinishReason.STOP, self._sampling)\n",
        "        known = self._settled\n",
        ("tests/producers/gateway/test_text.py::test_a_stream_sends_what_is_recorded",),
    ),
    # What takes too long to compare is taken for wrong.
    Mutant(
        "72",
        "a time-out of math_verify is a zero",
        MATHEMATICS,
        "        except Exception:  # sympy raises anything where two things cannot be compared\n",
        "        except (Exception, TimeoutException):\n",
        (f"{REWARDS}/builtin/test_golds.py::test_a_time_out_is_no_verdict",),
    ),
    # The alarm of one call ends or fails a later one, which gets the blame.
    Mutant(
        "73",
        "an alarm that a reward function leaves running is not cancelled",
        "producers/rewards/child.py",
        "                signal.setitimer(signal.ITIMER_REAL, 0)\n",
        "                pass\n",
        (f"{REWARDS}/test_runner.py::test_an_alarm_that_a_call_leaves_running_harms_no_later_call",),
    ),
    # The figures of a run have steps that a crash undid.
    Mutant(
        "74",
        "evaluations of undone weights stay in the summary",
        "streamrl/observability/run_state/evaluations.py",
        "            self.rows = [row for row in self.rows if not self._is_undone(row[0])]\n",
        "            self.rows = [*self.rows]\n",
        ("tests/observability/run_state/test_evaluations.py::test_an_undone_evaluation_is_in_no_summary",),
    ),
    Mutant(
        "74b",
        "evaluations of undone weights stay in the report",
        "streamrl/inspection/report/record.py",
        "            evaluations = {at_step: result for at_step, result in evaluations.items() if at_step < step}\n",
        "            evaluations = dict(evaluations)\n",
        ("tests/inspection/report/record/test_rows.py::test_evaluations_of_undone_weights_are_left_out",),
    ),
)
