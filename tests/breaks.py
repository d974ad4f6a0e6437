"""Puts the causes of defects back, one at a time, and sees a test fail for each:

    python tests/breaks.py [PART ...]

PART is a part of a break's name or of its file's: `rljax/losses` runs the breaks of that room.

Each break is an exact text of a file and what stands in its place; a copy of the last commit is
changed, never this checkout. As many run at once as there are cores. Exit code 1 where a break
makes no test fail, or is in no file any more. Every night, not in the normal lane: each break runs
its tests anew.
"""

import json
import os
import queue
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent
CHAT, CONTENTS = "rljax/data/text/chat.py", "rljax/data/text/contents.py"
PUBLISHED = "tests/data/test_published_templates.py"
TEMPLATES = "tests/data/test_chat_templates.py"
TRUST, ORDERS = "rljax/config/trust.py", "tests/data/test_recorded_orders.py"
PROGRAM, ON_DEVICE = "tests/training/test_program_steps.py", "tests/rewards/test_on_device.py"
BEST_OF_K = "tests/advantages/test_best_of_k.py"
OFF_POLICY = "tests/losses/test_off_policy_losses.py"
HUB, HOSTILE = "rljax/hub/client.py", "tests/hub/test_hostile_hub.py"
TEACHERS, HINTED = "tests/dataflows/test_teachers.py", "tests/rollout/test_hinted.py"
NETS, OF_NETS = "rljax/models/gated_delta.py", "tests/models/test_gated_delta.py"
TURNS = "tests/sampler/test_sampler_turns.py"
HINTS = "rljax/rollout/rules/hinted.py"
# name: (file, the text, what stands in its place, pytest's arguments)
BREAKS = {
    "every row has the first teacher": (
        "rljax/roles/teachers.py",
        "jnp.where(batch.teacher == i, batch.mask, 0.0)",
        "jnp.where(batch.teacher > 0, batch.mask, 0.0)",
        [TEACHERS, "-k", "log_probs or own_teacher"],
    ),
    "a convolution sees the sequence before": (
        NETS,
        "own = _over_channels(run_of_input[:, back] == runs, x)",
        "own = _over_channels(runs == runs, x)",
        [OF_NETS, "-k", "convolution"],
    ),
    "a state goes on into the next sequence": (
        NETS,
        "from_start = jnp.where(carried, jnp.exp(total), 0.0)",
        "from_start = jnp.where(True, jnp.exp(total), 0.0)",
        [OF_NETS, "-k", "recurrence"],
    ),
    "a state reads the last token of a prompt twice": (
        "rljax/models/model.py",
        "before_last = jnp.arange(x.shape[1])[None, :] < lengths[:, None] - 1",
        "before_last = jnp.arange(x.shape[1])[None, :] < lengths[:, None]",
        [TURNS, "-k", "fresh_request and recurrent"],
    ),
    "the state of a slot that waits goes on": (
        "rljax/sampler/slots.py",
        "counts = slots.live.astype(jnp.int32) if recurrent else None",
        "counts = None",
        [TURNS, "-k", "fresh_request and recurrent"],
    ),
    "a slot begins with the state before it": (
        "rljax/models/model.py",
        "recurrence_inputs(self.config, valid, columns > 0)",
        "recurrence_inputs(self.config, valid, columns >= 0)",
        [TURNS, "-k", "fresh_request and recurrent"],
    ),
    "a branch goes on with later tokens": (
        "rljax/sampler/scheduler.py",
        "cached = read_count if goes_back or read_count <= len(ids) - 1 else 0",
        "cached = read_count",
        ["tests/sampler/test_branch.py", "-k", "went_round"],
    ),
    "the experts of a layer are read in the order of their names": (
        "rljax/models/huggingface/checkpoint_folder.py",
        "{i // len(parts)}.{parts[i % len(parts)]}.weight",
        "{i % experts.count}.{parts[i // experts.count]}.weight",
        ["tests/models/test_written_families.py", "-k", "qwen3_5_with_images"],
    ),
    "rows without a teacher are learned": (
        "rljax/dataflows/steps.py",
        "    taught = batch.replace(mask=jnp.where(batch.teacher > 0, batch.mask, 0.0))\n",
        "    taught = batch\n",
        [TEACHERS, "-k", "own_teacher or sampled_token"],
    ),
    "the policy flees its teacher": (
        "rljax/dataflows/distil.py",
        "advantages = -teacher_gap(corrected)",
        "advantages = teacher_gap(corrected)",
        [TEACHERS, "-k", "sampled_token"],
    ),
    "the teacher is asked again without its hint": (
        "rljax/dataflows/steps.py",
        "if batch.teacher_logprobs is None:",
        "if True:",
        [HINTED, "-k", "teachers_view"],
    ),
    "a teacher stays where the dataflow is no program": (
        "rljax/roles/placed.py",
        "new_roles = {**trained, **returned}",
        "new_roles = {**returned}",
        [HINTED, "-k", "no_program"],
    ),
    "every sample has the hint of the first one": (
        HINTS,
        "hint(record, samples, number)",
        "hint(record, samples, 0)",
        [HINTED, "-k", "behind_the_prompt"],
    ),
    "a teacher with a hint is read one token late": (
        HINTS,
        "- starts[:, None] + begins[:, None]",
        "- starts[:, None] + begins[:, None] + 1",
        [HINTED, "-k", "behind_the_prompt"],
    ),
    "samples without a hint are taught": (
        HINTS,
        "of_teacher = taught[:, None] & (batch.mask > 0)",
        "of_teacher = batch.mask > 0",
        [HINTED, "-k", "behind_the_prompt or too_long"],
    ),
    "a sample that is right is its own hint": (
        "rljax/rollout/rules/hints.py",
        "for step in range(1, len(samples)):",
        "for step in range(len(samples)):",
        [HINTED, "-k", "another_sample"],
    ),
    "a teacher that follows the policy runs ahead of it": (
        "rljax/roles/teachers.py",
        "(1 - own.rate) * old + own.rate * new",
        "own.rate * old + (1 - own.rate) * new",
        [HINTED, "-k", "by_its_rate"],
    ),
    "metrics of samples leave out those without a teacher": (
        "rljax/dataflows/distil.py",
        "metrics = sample_metrics(sampled, actor.state.step, correct_at=cfg.correct_at)",
        "metrics = sample_metrics(batch, actor.state.step, correct_at=cfg.correct_at)",
        [TEACHERS, "-k", "metrics_of_samples"],
    ),
    "a teacher beside a reward is added with the wrong sign": (
        "rljax/dataflows/steps.py",
        "advantages = advantages - cfg.teacher_coef * teacher_gap(batch)",
        "advantages = advantages + cfg.teacher_coef * teacher_gap(batch)",
        [TEACHERS, "-k", "advantage_of_every"],
    ),
    "the gap reads garbage under the mask": (
        "rljax/dataflows/steps.py",
        "return jnp.where(taught, batch.old_logprobs, 0.0) - ",
        "return batch.old_logprobs - ",
        [TEACHERS, "-k", "advantage_of_every"],
    ),
    "the last pattern that fits chooses the teacher": (
        "rljax/setup/teachers.py",
        "    return next(fits, len(config.teachers)",
        "    return max(fits, default=len(config.teachers)",
        [TEACHERS, "-k", "pattern"],
    ),
    "prompts that fit no pattern have the first teacher": (
        "rljax/setup/teachers.py",
        "len(config.teachers) + 1 if config.teacher_model else 0)",
        "1)",
        [TEACHERS, "-k", "pattern"],
    ),
    "the number of the teacher is lost where rows are packed": (
        "rljax/learn/packing.py",
        '        fields["teacher"] = put(batch.teacher)\n',
        '        fields["teacher"] = jnp.minimum(put(batch.teacher), 1)\n',
        [TEACHERS, "-k", "own_teacher"],
    ),
    "a token counts among those before itself": (
        "rljax/dataflows/distil.py",
        "before = jnp.cumsum(size, axis=1) - size",
        "before = jnp.cumsum(size, axis=1)",
        [TEACHERS, "-k", "early"],
    ),
    "stored log-probs of other rows are taken": (
        "rljax/training/offline.py",
        "    if digests is not None and not np.array_equal(digests, _row_digests(setup)):\n"
        "        return False\n",
        "",
        ["tests/training/test_offline.py", "-k", "rows_that_have_changed"],
    ),
    "the end of turn is no stop token": (
        "rljax/data/text/tokenizer.py",
        "        self._join_turn_ends()\n",
        "",
        [PUBLISHED],
    ),
    "a stop token of the next role is not learned": (
        CHAT,
        "            return added[slice(*offsets[0])], written\n",
        "            return '', written\n",
        [PUBLISHED, "-k", "glm4_5"],
    ),
    "what stands behind the stop token is learned": (
        CHAT,
        "        return _Turn(prompt, written + end, len(end), through, begin)\n"
        "    return _Turn(prompt, ended, 0, through, begin)\n",
        "        return _Turn(prompt, written + end, len(end), through, begin)\n"
        "    return _Turn(prompt, written, 0, through, begin)\n",
        [PUBLISHED, "-k", "phi"],
    ),
    "a turn without an end gets none": (
        CHAT,
        "    return end, written if marks else written.rstrip()\n",
        "    return '', written\n",
        ["tests/data/test_chat.py"],
    ),
    "a prefill is closed": (
        CHAT,
        "        return dict(add_generation_prompt=False, continue_final_message=True)\n",
        "        return {}\n",
        [PUBLISHED, "-k", "qwen3"],
    ),
    "templates that open the reasoning are refused": (
        CHAT,
        '    header = _NO_REASONING_END.sub("", turn_start)\n',
        "    header, opened = through, None\n",
        ["tests/data/test_chat.py", "-k", "supplies"],
    ),
    "the reasoning of a turn behind <think> is lost": (
        CHAT,
        '    return f"{reasoning}{separator}{close}{2 * separator}{text_after}"\n',
        "    return text_after\n",
        ["tests/data/test_chat.py", "-k", "supplies"],
    ),
    "a rewritten turn is learned": (
        CHAT,
        '    raise _rewritten_error(f"message {k}", turn_text, text)\n',
        "    return text, spans\n",
        ["tests/data/test_chat.py", TEMPLATES],
    ),
    "a greeting behind a system message is learned": (
        CHAT,
        '    if not first and asking and messages[asking[0]]["role"] == "user":\n',
        "    if False:\n",
        ["tests/data/test_chat.py", "-k", "greeting"],
    ),
    "a joined turn is refused, or learned with the turn before it": (
        CHAT,
        "    for find in (_turn_behind_other_history, _turn_behind_joined, _turn_behind_supplied):\n",
        "    for find in (_turn_behind_other_history, _turn_behind_supplied):\n",
        ["tests/data/test_chat.py", "-k", "joined"],
    ),
    "what a template leaves out is remembered of another tokenizer": (
        CONTENTS,
        "    verdicts = _PROBES.setdefault(tokenizer, {})\n",
        "    verdicts = _PROBES.setdefault(Mapping, {})\n",
        ["tests/data/test_contents.py", "-k", "another_tokenizer"],
    ),
    "a greeting is learned": (
        CHAT,
        "        return k > 0 and bool(_prompt(tokenizer, messages, k, options))\n",
        "        return True\n",
        ["tests/data/test_chat.py", "-k", "greeting"],
    ),
    "a token spans the border of prompt and turn": (
        CHAT,
        "            piece_ids, spans = encode_after(tokenizer, (ids or prompt)[-1], piece)\n",
        "            piece_ids, spans = tokenizer.encode_with_offsets(piece)\n",
        ["tests/data/test_append.py", "-k", "sentencepiece"],
    ),
    "a stop token within a turn is learned": (
        CHAT,
        "    if stops and stops[0][1] < (end or len(written)):\n",
        "    if False:\n",
        ["tests/data/test_chat.py", "-k", "stop_token_within"],
    ),
    "a turn of weight 0 is learned": (
        CHAT,
        'm["role"] == "assistant" and m.get(LEARN) is not False',
        'm["role"] == "assistant"',
        ["tests/data/test_rows_of_messages.py", TEMPLATES],
    ),
    "what is learned is not compared with the row": (
        CONTENTS,
        '    for key, piece in [("reasoning", reasoning), *_message_texts(tokenizer, message, answer)]:\n',
        "    for key, piece in []:\n",
        [TEMPLATES],
    ),
    "what is read is not compared with the row": (
        CONTENTS,
        "            raise _left_out_error(number, message, key, piece)\n    for number, key in",
        "            continue\n    for number, key in",
        ["tests/data/test_contents.py"],
    ),
    "short texts are looked for and not probed": (
        CONTENTS,
        "    if not (may_occur_by_chance or tools or any(calls)):\n",
        "    if True:\n",
        ["tests/data/test_contents.py"],
    ),
    "the flags of a message are dropped": (
        "rljax/data/rows/conversation.py",
        "        converted[LEARN] = False\n",
        "        pass\n",
        ["tests/data/test_rows_of_messages.py"],
    ),
    "nulls of a table reach calls": (
        "rljax/data/rows/nulls.py",
        "{**message, name: self._clean_calls(message[name], tools)}",
        "message",
        ["tests/data/test_rows_of_messages.py"],
    ),
    "arguments stay JSON text": (
        "rljax/data/text/messages.py",
        'for_template(messages), "chat messages"',
        'messages, "chat messages"',
        ["tests/data/test_rows_of_messages.py"],
    ),
    "variables of a row are dropped": (
        "rljax/data/rows/columns.py",
        '    return options | ({"variables": variables} if variables else {})\n',
        "    return options\n",
        ["tests/data/test_formats.py", "-k", "variables"],
    ),
    "rewards read the reasoning": (
        "rljax/reasoning.py",
        "    visible = _messages_to_the_user(text)\n",
        "    return response\n",
        ["tests/rewards/test_reasoning.py"],
    ),
    "an abstention is an error": (
        "rljax/rewards/pool/foreign.py",
        "            None if abstains(x) else",
        "            float(x) if abstains(x) else",
        ["tests/rewards/test_foreign_rewards.py"],
    ),
    "calls in the reasoning are made": (
        "rljax/environments/calls/format.py",
        "        thought = reasoning_spans(text, begun, whole.spans or ())\n",
        "        thought = []\n",
        ["tests/environments/test_calls.py"],
    ),
    "stop strings that are special tokens never match": (
        "rljax/setup/setup.py",
        "(*tokenizer.eos_ids, *stop_tokens(tokenizer, sampler.stop_strings))",
        "tokenizer.eos_ids",
        ["tests/serving/test_fields.py"],
    ),
    "a head beside a tied config is dropped": (
        "rljax/models/huggingface/load.py",
        "        if config.tie_embeddings and checkpoint_folder.has_own_head(path.parent, config):\n",
        "        if False:\n",
        ["tests/models/test_loading.py", "-k", "tie or tied or head"],
    ),
    "tokenizers are compared by their sizes": (
        "rljax/setup/same_ids.py",
        "        if token != tokens.get(i)\n",
        "        if False\n",
        ["tests/setup/test_same_ids.py"],
    ),
    "an export stops where the base does": (
        "rljax/setup/images.py",
        "{**ids, **exported, **base, **ends}",
        "{**ids, **exported, **ends, **base}",
        ["tests/setup/test_exports.py"],
    ),
    "data.turns is not read by offline rows": (
        "rljax/data/online/encoded.py",
        ", turns=config.data.turns",
        "",
        ["tests/data/test_turns_of_runs.py"],
    ),
    "data.turns is not read by supervised steps": (
        "rljax/data/online/examples.py",
        "images=reader, turns=config.data.turns",
        "images=reader",
        ["tests/data/test_turns_of_runs.py"],
    ),
    "a run's variables do not reach the template": (
        "rljax/data/online/encoded.py",
        "    variables = template_variables(config)\n",
        "    variables = None\n",
        ["tests/data/test_turns_of_runs.py"],
    ),
    "the rows of a window have the order of another one": (
        "rljax/data/rows/stored.py",
        "epoch, 1 + window)]",
        "epoch, 2 + window)]",
        [ORDERS],
    ),
    "a run goes on at the begin of a chunk": (
        "rljax/data/online/loader.py",
        "offset = self._drawn % self._size\n",
        "offset = self._drawn % self._size if self._chunk else 0\n",
        [ORDERS],
    ),
    "each epoch has the same order": (
        "rljax/data/online/loader.py",
        "order(i // len(items))",
        "order(0)",
        [ORDERS],
    ),
    "a bad row is an error before it is drawn": (
        "rljax/data/online/loader.py",
        "functools.partial(_attempt, items.drawn)",
        "items.drawn",
        ["tests/data/test_stream.py"],
    ),
    "a stream drops all turns but the first": (
        "rljax/data/online/prompts.py",
        "    if len(examples) == 1:\n",
        "    if examples:\n",
        ["tests/data/test_turns_of_runs.py"],
    ),
    "images of later turns stay with an earlier one": (
        "rljax/data/images/encode.py",
        'side="right"',
        'side="left"',
        ["tests/data/test_turns_of_runs.py"],
    ),
    "a length is asked for in the begun turn": (
        "rljax/data/online/encoded.py",
        'if m["role"] != "assistant"]',
        "]",
        ["tests/data/test_turns_of_runs.py"],
    ),
    "an agent's calls lose their reasoning": (
        CHAT,
        "    for find in (_turn_behind_other_history, _turn_behind_joined, _turn_behind_supplied):\n",
        "    for find in (_turn_behind_joined, _turn_behind_supplied):\n",
        [PUBLISHED, "-k", "agent"],
    ),
    "a template of parts gets texts": (
        "rljax/data/text/forms.py",
        '    text_groups = [g for g in best.unwritten if g.content == ("text",)]\n',
        "    text_groups = []\n",
        [PUBLISHED, "-k", "short_texts or idefics3"],
    ),
    "a list of parts that is written as a list is taken for a text": (
        "rljax/data/text/forms.py",
        " and _KEY_MARK.format(number) not in text\n",
        "\n",
        ["tests/data/test_contents.py", "-k", "parts"],
    ),
    "the header of the next answer ends a call": (
        "rljax/data/text/ends.py",
        "    ending = ending.removesuffix(opener)\n",
        "",
        [PUBLISHED, "-k", "always"],
    ),
    "several turns of a pair: a tool's answer is learned": (
        CHAT,
        "            mask += [0] * len(added)\n",
        "            mask += [1] * len(added)\n",
        ["tests/data/test_contents.py", "-k", "pair"],
    ),
    "a cut trajectory is finished by the template": (
        "rljax/data/offline/encode.py",
        "    if not ended and len(completion) == 1",
        "    if False and len(completion) == 1",
        ["tests/data/test_contents.py", "-k", "cut"],
    ),
    "the last of ended steps ends with the end-of-text token": (
        "rljax/data/online/prompts.py",
        "tokenizer.end_of_turn_id if turn else tokenizer.eos_ids[0]",
        "tokenizer.eos_ids[0]",
        ["tests/data/test_preference_encoding.py", "-k", "ended_steps"],
    ),
    "an episode goes on without a tool's answer": (
        "rljax/environments/conversation.py",
        "        check_messages(\n",
        "        (lambda *_: None)(\n",
        ["tests/environments/test_episode.py", "-k", "leaves_out"],
    ),
    "an episode is rendered without the variables of its row": (
        "rljax/environments/episode.py",
        "variables=self._variables,",
        "variables=None,",
        ["tests/environments/test_episode.py", "-k", "variables"],
    ),
    "a system column is dropped": (
        "rljax/data/rows/columns.py",
        "    row = _with_system(row, location)\n",
        "",
        ["tests/data/test_formats.py", "-k", "system"],
    ),
    "a served run has no stop strings": (
        "rljax/serving/fields.py",
        '*(() if fields["ignore_eos"] else stops)',
        "",
        ["tests/serving/test_fields.py"],
    ),
    "the server writes the flags of a decoder into prompts": (
        "rljax/environments/schemas.py",
        "def told_of(",
        "def told_of(tool): return tool\n\n\ndef _told_of(",
        ["tests/serving/test_tool_calls.py", "-k", "decoder"],
    ),
    "ids without a token are drawn": (
        "rljax/setup/setup.py",
        "dataclasses.replace(model_config, known_ids=tokenizer.vocab_size)",
        "model_config",
        ["tests/sampler/test_known_ids.py", "tests/setup/test_same_ids.py"],
    ),
    "rsLoRA is scaled as LoRA": (
        "rljax/models/huggingface/peft.py",
        '(math.sqrt(rank) if config.get("use_rslora") else rank)',
        "rank",
        ["tests/models/test_lora.py", "-k", "rslora or settings or peft"],
    ),
    "letters keep no labels": (
        "rljax/rewards/answers/letters.py",
        "def letter_of(",
        "def letter_of(*_, **__): return None\n\n\ndef _letter_of(",
        ["tests/rewards/test_rule_rewards.py"],
    ),
    "a stopped run hands out an earlier policy": (
        "rljax/training/result.py",
        "            return None\n        names",
        "            pass\n        names",
        ["tests/training/test_train_from_python.py", "-k", "stopped_run_has"],
    ),
    "a run writes no page of its data": (
        "rljax/training/loop.py",
        "                    write_data_page(folder, run.setup)\n",
        "",
        ["tests/training/test_train_from_python.py", "-k", "page_of_its"],
    ),
    "the token goes wherever a hub redirects to": (
        HUB,
        "        if _server(url) == _server(constants.ENDPOINT) and (token := _token()):\n",
        "        if token := _token():\n",
        [HOSTILE, "-k", "token"],
    ),
    "a body is read to its end": (
        HUB,
        "        if remaining < 0:\n",
        "        if False:\n",
        [HOSTILE, "-k", "body_ends and byte"],
    ),
    "what a link in the cache leads to is removed": (
        HUB,
        "            if link.resolve().parent == blob.parent.resolve():\n",
        "            if True:\n",
        [HOSTILE, "-k", "left_in_the_cache"],
    ),
    "a link out of the cache is followed": (
        HUB,
        "        if not is_inside:",
        "        if False:",
        [HOSTILE, "-k", "left_in_the_cache"],
    ),
    "any ETag is believed": (
        HUB,
        "    if not _DIGEST.fullmatch(etag.strip('\"')):\n",
        "    if False:\n",
        [HOSTILE, "-k", "environment"],
    ),
    "another commit is taken": (
        HUB,
        "    if name.pinned and commit != name.revision:\n",
        "    if False:\n",
        [HOSTILE, "-k", "another_commit"],
    ),
    "a stranger at the coordinator's port ends the run": (
        "rljax/hosts/rendezvous.py",
        "        numbers = type(hello.host) is int and type(hello.hosts) is int\n",
        "        numbers = True\n",
        ["tests/hosts/test_strangers.py", "-k", "passed_over"],
    ),
    "parts of a checkpoint overlap": (
        "rljax/checkpoint/pieces.py",
        " or _overlap(filled[bounds])",
        "",
        ["tests/checkpoint/test_store_checkpoints.py", "-k", "forged"],
    ),
    "a save waits by the wall clock": (
        "rljax/checkpoint/disk.py",
        "timeout_secs=_SAVE_TIMEOUT_S, ",
        "",
        ["tests/training/test_checkpoint.py", "-k", "clock"],
    ),
    "a stopped run returns": (
        "rljax/training/loop.py",
        "        raise RunStopped(run, signal)\n",
        "        return run\n",
        ["tests/training/test_train_from_python.py"],
    ),
    "a package that is missing is looked for in the user's folder": (
        "rljax/components.py",
        '        fix = f"pip install {_PACKAGES.get(root, root)}"\n',
        '        fix = f"put {folder} on PYTHONPATH"\n',
        ["tests/test_components.py"],
    ),
    "the file of a component is run to list its functions": (
        "rljax/components.py",
        "        raise _needs_a_function(whole_file[1])\n",
        '        _of_file(f"{whole_file[1]}:x")\n',
        ["tests/test_components.py", "-k", "lists"],
    ),
    "the fix of dropped rows is always of their length": (
        "rljax/data/offline/encode.py",
        "max(REASONS, key=lambda name: counts.get(name, 0))",
        "'dropped_overlong'",
        ["tests/data/test_own_files.py"],
    ),
    "a table is always separated by commas": (
        "rljax/data/rows/read.py",
        "if mark in header), usual)",
        "if mark in 'a,'), usual)",
        ["tests/data/test_own_files.py"],
    ),
    "rows of another kind lead nowhere": (
        "rljax/data/rows/columns.py",
        "        if has_prompt and columns <= present and not columns & set(lacking):\n",
        "        if False:\n",
        ["tests/data/test_own_files.py"],
    ),
    "a solution is the answer whole": (
        "rljax/data/rows/sources.py",
        "    marked_answer = last_boxed(solution) or ",
        "    marked_answer = solution or ",
        ["tests/data/test_own_files.py"],
    ),
    "the parts of an estimate are of other programs": (
        "rljax/plan/memory.py",
        "        return self._held() | peak\n",
        "        return self._held() | self.learn\n",
        ["tests/plan/test_plan.py", "-k", "printed_are"],
    ),
    "a refusal of memory forgets the largest part": (
        "rljax/plan/memory.py",
        "        if not smaller:\n            break\n        changes = ",
        "        break\n        changes = ",
        ["tests/plan/test_plan.py", "-k", "largest"],
    ),
    "a worker's error has two fixes": (
        "rljax/workers/function.py",
        "    if has_fix:\n",
        "    if False:\n",
        ["tests/rewards/test_reward_pool.py", "-k", "cannot_be_loaded"],
    ),
    "the base under adapters is sent after every update": (
        "rljax/sampler/layout.py",
        "        if held_key == key and _same(leaves, [reference() for reference in made_of]):\n",
        "        if False:\n",
        ["tests/sampler/test_layouts.py", "-k", "adapters_alone"],
    ),
    "a base is found by its layout alone": (
        "rljax/sampler/layout.py",
        "        if held_key == key and _same(leaves, [reference() for reference in made_of]):\n",
        "        if held_key == key:\n",
        ["tests/sampler/test_layouts.py", "-k", "another_base"],
    ),
    "a base that stays in the layout of decoding is not planned": (
        "rljax/setup/held.py",
        "    if base_copy := _kept_copy(setup, roles):\n",
        "    if base_copy := {}:\n",
        ["tests/plan/test_plan.py", "-k", "base_in_the_layout"],
    ),
    "a fence within reasoning fences the next block": (
        "rljax/reasoning.py",
        "bisect.bisect_left(starts, start)",
        "0",
        ["tests/rewards/test_reasoning.py"],
    ),
    "a comment above makes a mark a word": (
        "rljax/reasoning.py",
        "max(free, lines.start_of(at)), at",
        "free, at",
        ["tests/rewards/test_reasoning.py"],
    ),
    "an empty cache of int8 rounds zeros": (
        "rljax/models/cache.py",
        "        layer_cache = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)\n",
        "        layer_cache = encode([jnp.zeros(x.shape, x.dtype) for x in parts])\n",
        ["tests/models/test_cache_tree.py"],
    ),
    "the first step traces again": (
        "rljax/setup/dry_run.py",
        "    noting.become_plain()\n",
        "",
        ["tests/training/test_compile_count.py"],
    ),
    "what a dataflow returns is not looked at": (
        "rljax/roles/program.py",
        "        _check_returned.get()(returned, {**roles, **read})\n",
        "",
        ["tests/validation/test_user_code.py"],
    ),
    "a field that is not there leads to a docstring": (
        "rljax/setup/dry_run.py",
        "mending(error) if location else",
        "'see its docstring' if location else",
        ["tests/validation/test_user_code.py", "-k", "inside"],
    ),
    "JAX is started without a look": (
        "rljax/command/launch.py",
        "            refuse_what_ends_jax()\n",
        "            pass\n",
        ["tests/doctor/test_doctor.py", "-k", "needs_jax"],
    ),
    "rljax.train starts JAX without a look": (
        "rljax/__init__.py",
        ".refuse_what_ends_jax()",
        "",
        ["tests/doctor/test_doctor.py", "-k", "old_jax"],
    ),
    "an error is made without a fix": (
        "rljax/tasks/task.py",
        ', fix=f"set {option} to at least {low}"',
        "",
        ["tests/test_house.py", "-k", "fix"],
    ),
    "a component that declares nothing is safe": (
        "rljax/contracts.py",
        "    safe: bool = False\n",
        "    safe: bool = True\n",
        ["tests/setup/test_trust.py", "-k", "does_not_declare or program"],
    ),
    "a text of an option is harmless whatever it is": (
        TRUST,
        "        return kind is PlainText\n",
        "        return True\n",
        ["tests/setup/test_trust.py", "-k", "does_not_declare or passwd"],
    ),
    "a field to come needs no trust": (
        TRUST,
        "return bool(value) and (rule is None or not rule(value, folder))",
        "return bool(value) and rule is not None and not rule(value, folder)",
        ["tests/setup/test_trust.py", "-k", "every_field"],
    ),
    "a function of a file is data by its ending": (
        "rljax/config/overrides.py",
        "    if names_file(spec):",
        "    if False:",
        ["tests/setup/test_trust.py", "-k", "jsonl"],
    ),
    "an address is a data file": (
        "rljax/config/overrides.py",
        '    if is_url(spec):\n        return "url"\n',
        "",
        ["tests/setup/test_trust.py", "-k", "rows.jsonl"],
    ),
    "a role without a name is not looked at": (
        TRUST,
        "is_harmless(named[1] if named else text, home)",
        "named is None or is_harmless(named[1], home)",
        ["tests/setup/test_trust.py", "-k", "roles"],
    ),
    "a note vouches for any config of its place": (
        TRUST,
        '        "config": to_dict(from_dict(to_dict(config), "a config")),\n',
        "",
        ["tests/setup/test_trust.py", "-k", "began_here"],
    ),
    "a note vouches for a function of the same name elsewhere": (
        TRUST,
        '        "functions": sorted(map(_file_of, own_names(config))),\n',
        "",
        ["tests/setup/test_trust.py", "-k", "began_here"],
    ),
    "any file is run as a Python config": (
        "rljax/config/flags.py",
        '        if not name.lower().endswith((".py", *_DATA)):\n',
        "        if False:\n",
        ["tests/setup/test_trust.py", "-k", "no_config"],
    ),
    "a row of reasoning_gym is evaluated": (
        "rljax/rewards/text/gym.py",
        "        _check_entry(name, entry)\n",
        "",
        ["tests/tasks/test_gym.py", "-k", "entry"],
    ),
    "a note vouches for copies": (
        TRUST,
        "str(source) if is_url(source) else os.path.realpath(source)",
        '""',
        ["tests/setup/test_trust.py", "-k", "began_here"],
    ),
    "a veto of rollout correction drops nothing": (
        "rljax/correction/weights.py",
        "        accepted = accepted * (1 - vetoed)\n",
        "",
        ["tests/correction/test_correction.py", "-k", "veto"],
    ),
    "the mean weight of sequences is that of tokens": (
        "rljax/correction/weights.py",
        'masked_mean(weights, batch.mask) if level == "token" else weighted_mean(weights, share)',
        "masked_mean(weights, batch.mask)",
        ["tests/correction/test_correction.py", "-k", "batch_normalise"],
    ),
    "a batch without policy tokens moves momentum": (
        "rljax/learn/fit.py",
        "take = ~(stopped | empty)",
        "take = ~stopped",
        ["tests/learn/test_update.py", "-k", "without_policy_tokens"],
    ),
    "a stack of matrices is factored as one": (
        "rljax/learn/update_rules.py",
        "scaling = [per_matrix(optax.chain(*parts))]",
        "scaling = [optax.chain(*parts)]",
        ["tests/learn/test_optimizers.py", "-k", "matrix_of_its_own"],
    ),
    "what two tiles of a vocabulary share counts twice": (
        "rljax/kernels/logprob/xla.py",
        "z = jnp.where(jnp.arange(tile_size) >= fresh, z, -jnp.inf)",
        "z = z",
        ["tests/kernels/test_logprob.py", "-k", "float64"],
    ),
    "the best word is numbered within its tile": (
        "rljax/kernels/logprob/xla.py",
        "stats = stats._replace(best=stats.best + vocab_start)",
        "pass",
        ["tests/kernels/test_logprob.py", "-k", "float64"],
    ),
    "the trainer reads rows of a head that have no token": (
        "rljax/models/model.py",
        "entries=config.known_ids",
        "entries=0",
        ["tests/sampler/test_known_ids.py", "-k", "trainer"],
    ),
    "a stop string is seen one token late": (
        "rljax/sampler/stop_strings.py",
        "while high - low > 1:",
        "while high - low > 2:",
        ["tests/sampler/test_sampler_stream.py", "-k", "first_token"],
    ),
    "each of k rows has itself in its baseline": (
        "rljax/advantages/groups.py",
        "factor = groups.size / jnp.maximum(groups.size - 1, 1)",
        "factor = 1.0",
        ["tests/advantages/test_advantages.py", "-k", "rloo"],
    ),
    "a baseline by length counts rows": (
        "rljax/advantages/groups.py",
        "length = jnp.where(counted, length, 0.0)",
        "length = jnp.where(counted, 1.0, 0.0)",
        ["tests/advantages/test_advantages.py", "-k", "opo"],
    ),
    "a clip takes the better of two losses": (
        "rljax/losses/policy/tokens.py",
        "return jnp.maximum(unclipped, clipped), clipped > unclipped",
        "return jnp.minimum(unclipped, clipped), clipped > unclipped",
        ["tests/losses/test_theory.py", "-k", "clip"],
    ),
    "the second clip bounds gains": (
        "rljax/losses/policy/tokens.py",
        "loss = jnp.where(negative, jnp.minimum(loss, bound), loss)",
        "loss = jnp.minimum(loss, bound)",
        ["tests/test_golden.py", "-k", "policy_loss_vanilla"],
    ),
    "the plan counts the dearer branch": (
        "rljax/plan/flops.py",
        "pick = max if in_kernel else min",
        "pick = max",
        ["tests/plan/test_plan.py", "-k", "flops_of"],
    ),
    "the pairs of a head stay beside each other": (
        "rljax/gguf/rows.py",
        "return head * head_rows + 2 * pair + half",
        "return row",
        ["tests/gguf/test_gguf_files.py", "-k", "rows_of_heads"],
    ),
    "norms keep the 1 that Gemma adds": (
        "rljax/gguf/rows.py",
        "    if rows.shift:\n",
        "    if False:\n",
        ["tests/gguf/test_gguf_files.py", "-k", "rows_of_heads"],
    ),
    "a child that was tried is as tempting as a new one": (
        "rljax/search/tree.py",
        "/ (1 + visits)",
        "/ jnp.maximum(visits, 1)",
        ["tests/search/test_tree.py"],
    ),
    "of equal children the prior does not decide": (
        "rljax/search/tree.py",
        "for x in (score, prior, -tokens):",
        "for x in (score, -tokens):",
        ["tests/search/test_tree.py"],
    ),
    "a response that is too long costs without end": (
        "rljax/shaping/scores.py",
        "penalty * (jnp.maximum(excess, -1.0) if floor else excess)",
        "penalty * excess",
        ["tests/shaping/test_sampling_rules.py", "-k", "overlong"],
    ),
    "wrong rows are charged for their length": (
        "rljax/shaping/scores.py",
        "is_correct = batch.scores >= correct_at",
        "is_correct = batch.scores >= 0",
        ["tests/shaping/test_sampling_rules.py", "-k", "correct_rows"],
    ),
    "adapters are merged without their rank": (
        "rljax/models/adapters/lora.py",
        "lora.alpha / lora.rank, stacked_axes",
        "lora.alpha, stacked_axes",
        ["tests/models/test_lora.py", "-k", "plain_weights"],
    ),
    "padding is a load of experts": (
        "rljax/models/experts.py",
        '"tokens": jnp.sum(jnp.where(mask, chosen, 0.0), axis=0)',
        '"tokens": jnp.sum(chosen, axis=0)',
        ["tests/models/test_experts.py", "-k", "padding"],
    ),
    "the tokenizer is a part of a role's program": (
        "rljax/roles/models.py",
        "        return dataclasses.replace(self, decoding=Decoding())\n",
        "        return self\n",
        ["tests/training/test_compile_count.py"],
    ),
    "a step leaves the actor without its way of decoding": (
        "rljax/roles/models.py",
        "        return dataclasses.replace(new, decoding=self.decoding)\n",
        "        return new\n",
        ["tests/training/test_compile_count.py", "-k", "eight_programs"],
    ),
    "a step that is not finite is taken": (
        "rljax/learn/state.py",
        "_changed(optimizer, gradient, state, finite & take, layout)",
        "_changed(optimizer, gradient, state, take, layout)",
        ["tests/training/test_faults.py", "-k", "do_not_move"],
    ),
    "steps in a row are counted over good ones": (
        "rljax/learn/state.py",
        "skipped_in_a_row=jnp.where(taken, 0, in_a_row),",
        "skipped_in_a_row=in_a_row,",
        ["tests/learn/test_update.py", "-k", "finite"],
    ),
    "the position of the data is not resumed": (
        "rljax/training/run.py",
        "        source.set_state(saved)\n",
        "        pass\n",
        ["tests/training/test_resume.py", "-k", "damaged_one or first_start"],
    ),
    "the implicit model learns from rows that the filter drops": (
        "rljax/dataflows/prime.py",
        "implicit.update(filter_baseline_rows(batch, cfg), loss, **options)",
        "implicit.update(batch, loss, **options)",
        ["tests/dataflows/test_prime.py"],
    ),
    "a failed sample is the best of its prompt": (
        "rljax/shaping/pairs.py",
        "    best_sample = jnp.argmax(jnp.where(live, scores, -jnp.inf), axis=1)\n",
        "    best_sample = jnp.argmax(scores, axis=1)\n",
        ["tests/dataflows/test_online_preference.py", "-k", "hand"],
    ),
    "continuations that a limit ended count by their score": (
        "rljax/rollout/rules/vine.py",
        "        if unfinished is not None:\n",
        "        if False:\n",
        ["tests/rollout/test_vine.py", "-k", "real_completions"],
    ),
    "continuations in flight are scored with what is no outcome": (
        "rljax/rollout/rules/vine.py",
        '    branch = require_sampler(sample, by="vine()").outcome_alone().branch\n',
        '    branch = require_sampler(sample, by="vine()").branch\n',
        ["tests/rollout/test_vine.py", "-k", "outcome_alone"],
    ),
    "the interval knows prompts alone": (
        "rljax/experiments/comparison.py",
        "values[rng.integers(0, seeds, seeds)][:,",
        "values[:,",
        ["tests/experiments/test_comparison.py", "-k", "widens"],
    ),
    "a digest is of bytes alone": (
        "rljax/experiments/lineage.py",
        'f"{name} {file_sha256(file)}\\n"',
        'f"{file_sha256(file)}\\n"',
        ["tests/experiments/test_pipeline.py", "-k", "digest"],
    ),
}

# At least three breaks of every other room, by room, in the order of their names.
ADVANTAGES, BATCH = "tests/advantages/test_advantages.py", "tests/test_batch.py"
CORRECTION, SHAPING = "tests/correction/test_correction.py", "tests/shaping/test_sampling_rules.py"
GAE, LOGPROB = "tests/kernels/test_gae.py", "tests/kernels/test_logprob.py"
BREAKS |= {
    # -- advantages
    "a token's length is that of its row, not of its episode": (
        "rljax/advantages/returns.py",
        "length = jnp.maximum(batches.sequence_tokens(batch), 1)",
        "length = jnp.maximum(batches.segment_tokens(batch), 1)",
        [ADVANTAGES, "-k", "vapo"],
    ),
    "a part that does not apply to a row is a 0 of its group": (
        "rljax/advantages/groups.py",
        "groups = group_statistics(part, ids, applies & counted)",
        "groups = group_statistics(part, ids, counted)",
        [ADVANTAGES, "-k", "gdpo"],
    ),
    "a response that ended is continued by its value": (
        "rljax/advantages/returns.py",
        "ends = batches.truncated(batch)[:, None] & (batches.last_token(batch) > 0)",
        "ends = batches.last_token(batch) > 0",
        [ADVANTAGES, "-k", "gae or bootstrap or truncated"],
    ),
    "the energy of a gradient adds up over rows": (
        "rljax/advantages/baseline.py",
        "return jnp.cumsum(jnp.where(is_policy, energy, 0.0), axis=1)",
        "return jnp.cumsum(jnp.where(is_policy, energy, 0.0), axis=0)",
        [ADVANTAGES, "-k", "optimal or otb"],
    ),
    # -- batch
    "what the sampler cut off is added to its log-probs": (
        "rljax/batch.py",
        "else logprobs - batch.sampler_log_kept",
        "else logprobs + batch.sampler_log_kept",
        [BATCH],
    ),
    "a narrower dtype passes the check of a batch": (
        "rljax/batch.py",
        "!= dtype.kind or value.dtype.itemsize < dtype.itemsize:",
        "!= dtype.kind:",
        [BATCH],
    ),
    "only a limit of tokens truncates": (
        "rljax/batch.py",
        "[batch.finish_reason == limit for limit in LIMITS])",
        "[batch.finish_reason == limit for limit in LIMITS[:1]])",
        ["tests/advantages/test_turns.py", "-k", "every_limit"],
    ),
    # -- checkpoint
    "the best checkpoint goes with the old ones": (
        "rljax/checkpoint/checkpoint.py",
        "            kept.add(best)\n",
        "            kept.discard(best)\n",
        ["tests/training/test_checkpoint.py", "-k", "best"],
    ),
    # -- command
    "a command ends before its threads": (
        "rljax/command/commands.py",
        "    threading._shutdown()\n",
        "",
        ["tests/command/test_command.py", "-k", "end_of_a_command"],
    ),
    "flags behind -- are a command's own": (
        "rljax/command/launch.py",
        "own_args, other_command = arguments[:separator], arguments[separator:]",
        "own_args, other_command = arguments, []",
        ["tests/command/test_command.py", "-k", "two_dashes"],
    ),
    "commands that go on from a run do not ask for trust": (
        "rljax/command/train.py",
        'trust = {n: " --trust_code" for n, config in configs.items() if asks(config)}',
        "pass",
        ["tests/command/test_next_steps.py"],
    ),
    # -- components
    "options of a call come before those of the text": (
        "rljax/components.py",
        "return self.function(*args, **{**kwargs, **self.options})",
        "return self.function(*args, **{**self.options, **kwargs})",
        ["tests/test_components.py"],
    ),
    # -- contracts
    "a compiled function has no contract": (
        "rljax/contracts.py",
        '        elif "__wrapped__" in _attributes(function):\n',
        "        elif False:\n",
        ["tests/test_contracts.py"],
    ),
    "options of a component are those of its function's defaults": (
        "rljax/contracts.py",
        "options = {**defaults, **options}",
        "options = {**options, **defaults}",
        ["tests/test_contracts.py"],
    ),
    # -- correction
    "the veto reads the mean of a sequence, not its tokens": (
        "rljax/correction/weights.py",
        "vetoed, numbers = _veto(x, batch, share, veto)",
        "vetoed, numbers = _veto(log_w, batch, share, veto)",
        [CORRECTION],
    ),
    "an open lower side of a ratio rejects nothing": (
        "rljax/correction/rejection.py",
        "lower = 1 / upper if name in RATIOS and upper is not None else -math.inf",
        "lower = -math.inf",
        [CORRECTION, "-k", "open_lower"],
    ),
    "quantiles are of n values, not of n - 1 steps": (
        "rljax/correction/ratios.py",
        "jnp.asarray(quantiles, x.dtype) * jnp.maximum(n - 1, 0).astype(x.dtype)",
        "jnp.asarray(quantiles, x.dtype) * n.astype(x.dtype)",
        [CORRECTION],
    ),
    # -- datagen
    "the line of the first error is right": (
        "rljax/datagen/first_error.py",
        "labels.append(1.0 if first_error is None or number < first_error else -1.0)",
        "labels.append(1.0 if first_error is None or number <= first_error else -1.0)",
        ["tests/datagen/test_labelling.py"],
    ),
    "a completed program may be longer than a written one": (
        "rljax/datagen/steps.py",
        'fits = [len(ids) <= limit and reason == "stop" for ids, reason in responses]',
        'fits = [reason == "stop" for ids, reason in responses]',
        ["tests/datagen/test_process_labels.py", "-k", "room"],
    ),
    "the probability of a pair is always that of the first": (
        "rljax/datagen/preferences.py",
        'probability = 1 - judged.probability if judged.outcome == "second" else judged.probability',
        "probability = judged.probability",
        ["tests/datagen/test_rlaif.py"],
    ),
    "a reward at its bound is selected": (
        "rljax/datagen/rejection.py",
        "if min_reward is not None and not rewards[i] > min_reward:",
        "if min_reward is not None and not rewards[i] >= min_reward:",
        ["tests/datagen/test_rejection_sampling.py", "-k", "method or worked or select"],
    ),
    "a label is the share of right responses, from 0 to 1": (
        "rljax/datagen/trees.py",
        "labels.append(2 * passed / count - 1)",
        "labels.append(passed / count)",
        ["tests/datagen/test_tree_labels.py"],
    ),
    # -- doctor
    "a run goes on from its first whole checkpoint": (
        "rljax/doctor/run_folder.py",
        'f"goes on from step {undamaged[-1]}" if undamaged',
        'f"goes on from step {undamaged[0]}" if undamaged',
        ["tests/doctor/test_doctor.py", "-k", "torn"],
    ),
    "JAX_PLATFORMS=gpu is not taken for CUDA's": (
        "rljax/doctor/environment.py",
        '("gpu", "cuda"),',
        '("cuda",),',
        ["tests/doctor/test_doctor.py", "-k", "ends_jax_is_found"],
    ),
    "a full disk is measured in MB": (
        "rljax/doctor/environment.py",
        "if free < disk_gb * 10**9:",
        "if free < disk_gb * 10**6:",
        ["tests/doctor/test_doctor.py", "-k", "counted_in_gb"],
    ),
    # -- evaluation
    "compute counts the steps of all phases": (
        "rljax/evaluation/scaling.py",
        '            total = row["x"] - offset\n',
        '            total = row["x"]\n',
        ["tests/evaluation/test_scaling.py"],
    ),
    "a length at a bound is in both buckets": (
        "rljax/evaluation/lengths.py",
        "values[(tokens > above) & (tokens <= upto)]",
        "values[(tokens >= above) & (tokens <= upto)]",
        ["tests/evaluation/test_evaluate.py", "-k", "bucket"],
    ),
    "no answer has a vote": (
        "rljax/evaluation/policy.py",
        "collections.Counter(a for a in answers if a is not None)",
        "collections.Counter(answers)",
        ["tests/evaluation/test_evaluate.py", "-k", "majority"],
    ),
    # -- experiments
    "a digest leaves out the names of files": (
        "rljax/experiments/lineage.py",
        'total.update(f"{name} {file_sha256(file)}\\n".encode())',
        'total.update(f"{file_sha256(file)}\\n".encode())',
        ["tests/experiments/test_pipeline.py", "-k", "digest"],
    ),
    "an interval takes the seeds as they are": (
        "rljax/experiments/comparison.py",
        "values[rng.integers(0, seeds, seeds)][:, rng",
        "values[:, rng",
        ["tests/experiments/test_comparison.py", "-k", "interval"],
    ),
    "a member that another host has stopped has failed": (
        "rljax/experiments/sweep.py",
        "if received or code == STOPPED:",
        "if received:",
        ["tests/experiments/test_sweep.py", "-k", "another_host or codes"],
    ),
    # -- files
    "a text has the digits of every script": (
        "rljax/files.py",
        "return kind(text) if text.isascii() else None",
        "return kind(text)",
        ["tests/test_strangers_files.py", "-k", "digits"],
    ),
    "a line loses the blanks at its end": (
        "rljax/files.py",
        '"utf-8-sig" if number == 1 else "utf-8").rstrip("\\n")',
        '"utf-8-sig" if number == 1 else "utf-8").rstrip()',
        ["tests/data/test_formats.py", "-k", "tables"],
    ),
    "a file is half written while it is replaced": (
        "rljax/files.py",
        '            hidden.write_text(text, encoding="utf-8")\n            os.replace(hidden, path)\n',
        '            path.write_text(text, encoding="utf-8")\n',
        ["tests/test_strangers_files.py", "-k", "written_whole"],
    ),
    # -- gguf
    "rows of a head stay in the order of the file": (
        "rljax/gguf/rows.py",
        "return head * head_rows + 2 * pair + half",
        "return head * head_rows + pair + half * (head_rows // 2)",
        ["tests/gguf/test_gguf_files.py", "-k", "rows_of_heads"],
    ),
    "what norms are shifted by is taken off": (
        "rljax/gguf/rows.py",
        "out += np.float32(rows.shift)",
        "out -= np.float32(rows.shift)",
        ["tests/gguf/test_gguf_files.py", "-k", "norms"],
    ),
    "tensors of a file overlap": (
        "rljax/gguf/header.py",
        "        if tensor.begin < last:\n",
        "        if tensor.end < last:\n",
        ["tests/gguf/test_gguf_files.py", "-k", "hostile"],
    ),
    # -- hosts
    "a host that waits for others is behind": (
        "rljax/hosts/watchdog.py",
        "return [k for k in last if not seen[k].current.waiting] or last",
        "return last",
        ["tests/hosts/test_watchdog.py", "-k", "behind"],
    ),
    "a host that says nothing any more is not silent": (
        "rljax/hosts/watchdog.py",
        "return self.current.silent_s + now - self.read_s",
        "return self.current.silent_s",
        ["tests/hosts/test_watchdog.py", "-k", "behind or alarm"],
    ),
    "a machine that is moved is about to end": (
        "rljax/hosts/stopping.py",
        "if (value := _metadata(url, name)) in _ENDS:",
        'if (value := _metadata(url, name)) not in ("", "NONE", "FALSE"):',
        ["tests/hosts/test_watchdog.py", "-k", "notice"],
    ),
    # -- kernels
    "a packed row's advantages run on into the segment before": (
        "rljax/kernels/gae/xla.py",
        "carried = jnp.where(segment == id_t, gamma[:, 0] * (value + lam_t * advantage), 0.0)",
        "carried = gamma[:, 0] * (value + lam_t * advantage)",
        [GAE],
    ),
    "the doublings stop one short": (
        "rljax/kernels/gae/xla.py",
        "jax.lax.fori_loop(0, (size - 1).bit_length(), one, tuple(arrays))",
        "jax.lax.fori_loop(0, (size - 1).bit_length() - 1, one, tuple(arrays))",
        [GAE],
    ),
    "rows that two tiles share have twice their gradient": (
        "rljax/kernels/logprob/xla.py",
        "            if rows % row_size:\n",
        "            if rows < row_size:\n",
        [LOGPROB],
    ),
    "a target in the overlap of two vocabulary tiles is found twice": (
        "rljax/kernels/logprob/xla.py",
        "(y - vocab_start >= fresh) & (y - vocab_start < tile_size)",
        "(y - vocab_start >= 0) & (y - vocab_start < tile_size)",
        [LOGPROB],
    ),
    # -- keys
    "the first step of a stream has the stream's own key": (
        "rljax/keys.py",
        "return key if step is None else fold_in(key, step)",
        "return key if not step else fold_in(key, step)",
        ["tests/test_keys.py"],
    ),
    "a stream has another key in another process": (
        "rljax/keys.py",
        "zlib.crc32(name.encode())",
        "hash(name) & 0xFFFFFFFF",
        ["tests/test_keys.py"],
    ),
    "a seed has as many bits as an exponent": (
        "rljax/keys.py",
        "np.uint32(seed & 0xFFFFFFFF)",
        "np.uint32(seed & 0xFFFF)",
        ["tests/test_keys.py"],
    ),
    # -- losses
    "sequences that the policy likes better than the sampler did are dropped": (
        "rljax/losses/policy/common.py",
        'jax.lax.stop_gradient(-log_difference(policy, batch, by=by, behaviour="sampler"))',
        'jax.lax.stop_gradient(log_difference(policy, batch, by=by, behaviour="sampler"))',
        ["tests/losses/test_policy_losses.py", "-k", "hardly"],
    ),
    "the first token past the shorter row has its whole weight": (
        "rljax/losses/preference/dpo.py",
        "batches.segment_order(batch) < shared_length[:, None]",
        "batches.segment_order(batch) <= shared_length[:, None]",
        ["tests/losses/test_preference_losses.py", "-k", "desensitised"],
    ),
    "a KL estimate with + has its own gradient, too": (
        "rljax/losses/kl.py",
        "carrier - jax.lax.stop_gradient(carrier) + jax.lax.stop_gradient(value)",
        "carrier - jax.lax.stop_gradient(carrier) + value",
        ["tests/losses/test_kl_and_value.py"],
    ),
    "old log-probs of decoupled PPO are not constant": (
        "rljax/losses/policy/tokens.py",
        "log_weight = constant(batch.old_logprobs, batch) - constant(behaviour, batch)",
        "log_weight = policy_logprobs(policy, batch) - constant(behaviour, batch)",
        ["tests/losses/test_policy_examples.py", "-k", "decoupled"],
    ),
    "MaxRL does not divide by the pass rate": (
        "rljax/advantages/groups.py",
        "centred / jnp.where(is_solved, groups.mean + eps, 1.0)",
        "centred",
        [BEST_OF_K, "-k", "maxrl or objective"],
    ),
    "MaxRL turns the order of scores below 0 round": (
        "rljax/advantages/groups.py",
        "is_solved = groups.mean > 0",
        "is_solved = groups.mean != 0",
        [BEST_OF_K, "-k", "maxrl"],
    ),
    "pass@k takes a row twice into its subsets": (
        "rljax/advantages/subsets.py",
        "above = running_total(above, rows.ids, reverse=True) - above",
        "above = running_total(above, rows.ids, reverse=True)",
        [BEST_OF_K, "-k", "subset"],
    ),
    "pass@k divides a rounding by eps where every subset is right": (
        "rljax/advantages/subsets.py",
        "(rows.counted > 0) & (rows.rank >= rows.k))",
        "rows.counted > 0)",
        [BEST_OF_K, "-k", "right_and_wrong or subset"],
    ),
    "PKPO compares with subsets that have the row": (
        "rljax/advantages/subsets.py",
        "_share_above(rows, rows.rank + 1, k)",
        "_share_above(rows, rows.rank, k)",
        [BEST_OF_K, "-k", "objective"],
    ),
    "PKPO counts an episode by its rows": (
        "rljax/advantages/subsets.py",
        "below = rows.counted * _share_above",
        "below = _share_above",
        ["tests/advantages/test_advantages.py", "-k", "several_rows and pkpo"],
    ),
    "a running total goes on in the next group": (
        "rljax/advantages/grouping.py",
        "jnp.where(left[1] == right[1], left[0], 0)",
        "left[0]",
        [BEST_OF_K, "-k", "running"],
    ),
    "FIPO sums tokens above the second clip": (
        "rljax/losses/policy/tokens.py",
        "jnp.where(is_skipped, 0.0, difference)",
        "difference",
        [OFF_POLICY, "-k", "fipo"],
    ),
    "FIPO raises the weight of bad tokens that are far out": (
        "rljax/losses/policy/tokens.py",
        "jnp.where(is_unsafe, jnp.minimum(weight, 1.0), weight)",
        "weight + jnp.where(is_unsafe, 0.0, 0.0)",
        [OFF_POLICY, "-k", "fipo"],
    ),
    "the weight of FIPO has a gradient": (
        "rljax/losses/policy/tokens.py",
        "    difference = jax.lax.stop_gradient(difference)\n    ratio = jnp.exp(difference)\n"
        "    is_skipped",
        "    ratio = jnp.exp(difference)\n    is_skipped",
        [OFF_POLICY, "-k", "fipo"],
    ),
    "LUFFY gives demonstrations the weight of samples": (
        "rljax/losses/policy/tokens.py",
        "jnp.where(shown, -advantages * weight, loss)",
        "jnp.where(~shown, -advantages * weight, loss)",
        [OFF_POLICY, "-k", "luffy"],
    ),
    "a demonstration is corrected as if a sampler had drawn it": (
        "rljax/batch.py",
        "jnp.where(is_sampled(batch), batch.sampler_logprobs, batch.old_logprobs)",
        "batch.sampler_logprobs",
        ["tests/correction/test_correction.py", "-k", "nobody"],
    ),
    "a demonstration replaces the first sample of its prompt": (
        "rljax/rollout/rules/demonstration.py",
        "x = jnp.concatenate([x[:, :-1], new[:, None]], axis=1)",
        "x = jnp.concatenate([new[:, None], x[:, 1:]], axis=1)",
        ["tests/rollout/test_demonstration.py", "-k", "last_row"],
    ),
    "TOPR pushes bad samples down harder, the likelier they are": (
        "rljax/losses/policy/sequences.py",
        "jnp.exp(jnp.minimum(log_weight, 0.0))",
        "jnp.exp(log_weight)",
        [OFF_POLICY, "-k", "topr"],
    ),
    "TOPR weighs a response by its mean ratio": (
        "rljax/losses/policy/sequences.py",
        'log_weight = difference if level == "token" else batches.segment_sum(difference, batch)',
        'log_weight = difference if level == "token" else sequence_mean(difference, batch)',
        [OFF_POLICY, "-k", "topr"],
    ),
    "M2PO bounds tokens that come back to the policy, too": (
        "rljax/losses/policy/selection.py",
        "eligible = eligible & (advantages * log_r > 0)",
        "eligible = eligible & (advantages != 0)",
        [OFF_POLICY, "-k", "m2po"],
    ),
    "M2PO keeps the first of equals": (
        "rljax/losses/policy/selection.py",
        'jnp.searchsorted(ordered, flat, side="right")',
        'jnp.searchsorted(ordered, flat, side="left")',
        [OFF_POLICY, "-k", "m2po"],
    ),
    "the mean of REAL leaves out groups that do not teach": (
        "rljax/losses/policy/sequences.py",
        "groups = jnp.maximum(jnp.sum(live / size), 1)",
        "groups = jnp.maximum(jnp.sum(teaches / size), 1)",
        [OFF_POLICY, "-k", "real"],
    ),
    "REAL has no anchor": (
        "rljax/losses/policy/sequences.py",
        "anchor = jnp.zeros_like(x)[:, None]",
        "anchor = jnp.full_like(x, -1e9)[:, None]",
        [OFF_POLICY, "-k", "real"],
    ),
    "REAL learns from groups with one label": (
        "rljax/losses/policy/sequences.py",
        "teaches = live & (counts[:, 1] > 0) & (counts[:, 2] > 0)",
        "teaches = live",
        [OFF_POLICY, "-k", "real"],
    ),
    # -- mesh
    "a slice has every second device": (
        "rljax/mesh.py",
        "parts = [devices[size * i : size * (i + 1)] for i in range(slices)]",
        "parts = [devices[i::slices] for i in range(slices)]",
        ["tests/test_mesh.py"],
    ),
    "slices of several sizes make a mesh": (
        "rljax/mesh.py",
        "        if len({len(part) for part in parts}) > 1:\n",
        "        if not all(parts):\n",
        ["tests/test_mesh.py"],
    ),
    "an axis takes a second mesh axis that divides it alone": (
        "rljax/mesh.py",
        "            if shape[i] % parts == 0:\n",
        "            if shape[i] % mesh.shape[target] == 0:\n",
        ["tests/test_mesh.py", "-k", "one_that_does"],
    ),
    # -- plan
    "a lognormal length is longer than its mean": (
        "rljax/plan/draws.py",
        "rng.lognormal(math.log(mean) - sigma**2 / 2, sigma, count)",
        "rng.lognormal(math.log(mean), sigma, count)",
        ["tests/plan/test_simulate.py", "-k", "draws"],
    ),
    # -- pods
    "a newer checkpoint leaves the count of failures as it is": (
        "rljax/pods/supervise.py",
        "failed_in_a_row, saved = 0, newest",
        "saved = newest",
        ["tests/pods/test_supervise.py"],
    ),
    "what a command leaves behind runs on": (
        "rljax/pods/supervise.py",
        "        _end_group(child.pid)\n",
        "",
        ["tests/pods/test_supervise.py"],
    ),
    "a chip of two devices counts as one": (
        "rljax/pods/pod.py",
        "return self.slices * self.chips * self.figures.devices_per_chip",
        "return self.slices * self.chips",
        ["tests/pods/test_pod.py", "tests/pods/test_templates.py"],
    ),
    # -- policies
    "rows that fill up a call are completions": (
        "rljax/policies/sampling.py",
        "live = min(size, len(prompts) - first) * n",
        "live = size * n",
        ["tests/policies/test_policies.py"],
    ),
    "each call of prompts draws the same": (
        "rljax/policies/sampling.py",
        "sample(part, fold_in(key, first), n=n * player.rows)",
        "sample(part, fold_in(key, 0), n=n * player.rows)",
        ["tests/policies/test_policies.py"],
    ),
    "forced tokens of a completion have log-probs": (
        "rljax/policies/sampling.py",
        "np.where(mask > 0, fetch(batch.sampler_logprobs), np.nan)",
        "fetch(batch.sampler_logprobs)",
        ["tests/policies/test_policies.py", "tests/evaluation/test_evaluate.py"],
    ),
    # -- report
    "the interval of a difference has its sides exchanged": (
        "rljax/report/run_folder.py",
        "low = d - math.hypot(after.value - after.low, before.high - before.value)",
        "low = d - math.hypot(after.high - after.value, before.value - before.low)",
        ["tests/tracking/test_report.py", "-k", "difference or interval"],
    ),
    "a text of an episode is markup": (
        "rljax/report/transcripts.py",
        'return escaped(_UNSEEN.sub("\\N{REPLACEMENT CHARACTER}", text))',
        'return _UNSEEN.sub("\\N{REPLACEMENT CHARACTER}", text)',
        ["tests/tracking/test_transcripts.py"],
    ),
    "the spread over seeds is that of a population": (
        "rljax/report/arms.py",
        "finite.std(ddof=1) / math.sqrt(n))",
        "finite.std() / math.sqrt(n))",
        ["tests/tracking/test_report_arms.py"],
    ),
    "a password in an address leaves the machine": (
        "rljax/report/redacted.py",
        '_SIGNED.sub(rf"\\1{HIDDEN}", _USER.sub(r"\\1", text))',
        '_SIGNED.sub(rf"\\1{HIDDEN}", text)',
        ["tests/hub/test_push.py"],
    ),
    # -- roles
    "the KL controller moves by the batch, not by its sequences": (
        "rljax/roles/state.py",
        "self.state * (1 + error * n / self.horizon)",
        "self.state * (1 + error / self.horizon)",
        ["tests/test_worked_examples.py", "tests/dataflows/test_dataflows.py", "-k", "controller"],
    ),
    "the entropy bonus stays on above its target": (
        "rljax/roles/state.py",
        "return jnp.where(entropy <= self.target, self.state, 0.0)",
        "return self.state",
        ["tests/dataflows/test_entropy_controller.py", "-k", "rule or target"],
    ),
    "the entropy coefficient moves the other way": (
        "rljax/roles/state.py",
        "jnp.where(entropy < self.target, self.size, -self.size)",
        "jnp.where(entropy > self.target, self.size, -self.size)",
        ["tests/dataflows/test_entropy_controller.py", "-k", "rule"],
    ),
    "a step without tokens has an entropy of 0": (
        "rljax/dataflows/steps.py",
        "    state = jnp.where(jnp.any(sampled), updated.state, entropy_controller.state)\n",
        "    state = updated.state\n",
        ["tests/dataflows/test_entropy_controller.py", "-k", "without_tokens"],
    ),
    "a turn that a limit cut off is what the environment said": (
        "rljax/batch.py",
        "    return begun & goes_on & ~in_turn & is_learned\n",
        "    return begun & ~in_turn & is_learned\n",
        ["tests/learn/test_observations.py", "-k", "between_turns"],
    ),
    "the observations are a part of the policy's tokens": (
        "rljax/roles/objectives.py",
        "        tokens.append(observed_tokens)\n",
        "        tokens.append(None)\n",
        ["tests/learn/test_observations.py", "-m", "", "-k", "gradient and microbatches"],
    ),
    "the samples keep their whole loss beside CHORD's examples": (
        "rljax/roles/pretraining.py",
        "        batch_share = 1 - coefficient if self.mixed else 1.0\n",
        "        batch_share = 1.0\n",
        ["tests/learn/test_pretraining.py", "-m", "", "-k", "share_of_the_objective"],
    ),
    "CHORD's token weight is the probability alone": (
        "rljax/losses/policy/tokens.py",
        "jax.lax.stop_gradient(-jnp.exp(logprobs) * jnp.expm1(logprobs))",
        "jax.lax.stop_gradient(jnp.exp(logprobs))",
        ["tests/losses/test_reward_model_losses.py", "-k", "chord"],
    ),
    "the multiplier's mean is over the oldest places of its window": (
        "rljax/roles/state.py",
        "filled = jnp.arange(window) >= window - seen",
        "filled = jnp.arange(window) < seen",
        ["tests/dataflows/test_safe_rlhf.py", "-k", "multiplier or lambda or window"],
    ),
    "the bias of an overloaded expert rises": (
        "rljax/roles/balance.py",
        "deficit = jnp.mean(tokens, axis=-1, keepdims=True) - tokens",
        "deficit = tokens - jnp.mean(tokens, axis=-1, keepdims=True)",
        ["tests/learn/test_router_balance.py", "-k", "by_hand"],
    ),
    # -- runs
    "a torn line loses the end of the one before": (
        "rljax/runs/jsonl.py",
        'self.file.truncate(path.read_bytes().rfind(b"\\n") + 1)',
        'self.file.truncate(max(path.read_bytes().rfind(b"\\n"), 0))',
        ["tests/tracking/test_tracking.py"],
    ),
    "who has lost a store's lock takes it back": (
        "rljax/runs/store_lock.py",
        "                self.check()  # who has lost it must not take it back\n",
        "",
        ["tests/training/test_store_runs.py", "-k", "left_to_it"],
    ),
    "the report is put before what it reads": (
        "rljax/runs/mirror.py",
        "sorted(local, key=lambda name: (name in _LAST, name == _LAST[-1], name))",
        "sorted(local)",
        ["tests/training/test_store_runs.py", "-k", "put_last"],
    ),
    "several processes may have the lock of a folder": (
        "rljax/runs/folder.py",
        "fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)",
        "fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)",
        ["tests/runs/test_run_folder.py"],
    ),
    "a look at a lock leaves its file open": (
        "rljax/runs/folder.py",
        "        return time.time() - os.fstat(file).st_mtime < STALE_S\n    finally:\n"
        "        os.close(file)\n",
        "        return time.time() - os.fstat(file).st_mtime < STALE_S\n",
        ["tests/runs/test_run_folder.py", "-k", "look"],
    ),
    # -- search
    "a node's visits are sharpened the wrong way": (
        "rljax/search/tree.py",
        "jnp.log(jnp.maximum(visits, 1).astype(jnp.float32)) / temperature",
        "jnp.log(jnp.maximum(visits, 1).astype(jnp.float32)) * temperature",
        ["tests/search/test_tree.py"],
    ),
    "a response whose reward failed is the best leaf": (
        "rljax/search/mcts.py",
        "            valued[indices] = ~failed\n",
        "",
        ["tests/search/test_mcts.py"],
    ),
    "noise, choices and rollouts of a search share their draws": (
        "rljax/search/mcts.py",
        "folded(keys, 2**30 + purpose)",
        "folded(keys, 2**30)",
        ["tests/search/test_mcts.py", "-k", "draws_of_their_own"],
    ),
    # -- serving
    "a stop string that begins anew within itself is missed": (
        "rljax/serving/text.py",
        "                while count and stop[count] != character:\n",
        "                if count and stop[count] != character:\n",
        ["tests/serving/test_serving.py", "-k", "within_itself"],
    ),
    "a name that ends with localhost is this machine": (
        "rljax/serving/guard.py",
        'return name.endswith(".localhost")',
        'return name.endswith("localhost")',
        ["tests/serving/test_connections.py", "-k", "pages"],
    ),
    # -- shaping
    "a prompt with one sample is filtered as without contrast": (
        "rljax/shaping/filters.py",
        "((low != high) | (size == 1)).astype(batch.mask.dtype)",
        "(low != high).astype(batch.mask.dtype)",
        [SHAPING],
    ),
    "a resampled row is never the one that was drawn": (
        "rljax/shaping/resampling.py",
        "peers & (index[None, :] <= index[:, None]), weights[None, :]",
        "peers & (index[None, :] < index[:, None]), weights[None, :]",
        [ADVANTAGES, "-k", "resampling"],
    ),
    "tokens that a row kept of another do not lengthen it": (
        "rljax/shaping/scores.py",
        "return tokens + batches.over_rows(batch.kept_tokens, batch)",
        "return tokens",
        [SHAPING, "-k", "kept"],
    ),
    # -- tasks
    "the tests of a program leave its last power open": (
        "rljax/tasks/program_task.py",
        "inputs = list(range(1, max(examples, lines + 2) + 1))",
        "inputs = list(range(1, max(examples, lines) + 1))",
        ["tests/tasks/test_program_task.py", "-k", "apart"],
    ),
    "the right side of a minus has no brackets": (
        "rljax/tasks/integers.py",
        'tight = level + (operation in "-/")',
        "tight = level",
        ["tests/tasks/test_tasks.py", "-k", "worked"],
    ),
    # -- tracking
    "the seconds of a phase are those of its last time": (
        "rljax/tracking/timing.py",
        "timings.seconds[name] = timings.seconds.get(name, 0.0) + end - start",
        "timings.seconds[name] = end - start",
        ["tests/tracking/test_tracking.py", "-k", "seconds"],
    ),
    "handlers of signals stay behind a run": (
        "rljax/tracking/signals.py",
        "            signal.signal(number, handler)\n",
        "            pass\n",
        ["tests/tracking/test_signals.py", "-k", "library"],
    ),
    "each turn of an episode may have all of its tokens": (
        "rljax/tracking/episodes.py",
        '        tokens_left -= min(tokens_left, len(turn["tokens"]))\n',
        "",
        ["tests/tracking/test_episodes_file.py"],
    ),
    "a resumed board keeps what a killed run wrote": (
        "rljax/tracking/services.py",
        "purge_step=step if resumed else None",
        "purge_step=None",
        ["tests/tracking/test_tracking.py", "-k", "tensorboard"],
    ),
    # -- validation
    "what a shipped config sets is said to be set in vain": (
        "rljax/validation/unread.py",
        "if all(value != value_of(base, name) for base in bases):",
        "if any(value != value_of(base, name) for base in bases):",
        ["tests/validation/test_unread.py"],
    ),
    "what a dataflow of rows does not read is said of one that samples": (
        "rljax/validation/unread.py",
        '        reasons["rows"] = ',
        '        reasons["samples"] = ',
        ["tests/validation/test_unread.py"],
    ),
    "one episode of a prompt is enough to compare": (
        "rljax/validation/environment.py",
        "not compares or samples > rows,",
        "not compares or samples >= rows,",
        ["tests/rollout/test_turn_advantages.py", "-k", "counted"],
    ),
    "a judge may take as long as the pool allows": (
        "rljax/validation/judges.py",
        "problems.check_field(timeout_s < reward.timeout_s,",
        "problems.check_field(timeout_s <= reward.timeout_s,",
        ["tests/validation/test_config.py", "-k", "each_rule"],
    ),
    # -- workers
    "a frame may hold anything of numpy": (
        "rljax/workers/wire.py",
        "if (module, name) in _NUMPY:",
        'if module.partition(".")[0] == "numpy":',
        ["tests/workers/test_broken_frames.py"],
    ),
    "a worker's children outlive it": (
        "rljax/workers/process.py",
        "start_new_session=True,  # out of",
        "start_new_session=False,  # out of",
        ["tests/workers/test_worker_processes.py"],
    ),
    # -- what strangers bring
    "the answer in a tag is not read": (
        "rljax/rewards/answers/find.py",
        "        if (content := in_tag(response)) is not None:\n",
        "        if (content := None) is not None:\n",
        ["tests/rewards/test_math_answers.py", "-k", "tag"],
    ),
    "several targets are one text": (
        "rljax/rewards/text/targets.py",
        "        ground_truth = _value_of(ground_truth)\n",
        "        pass\n",
        ["tests/rewards/test_rule_rewards.py", "-k", "targets"],
    ),
    "an object of a row is its JSON text": (
        "rljax/rewards/text/targets.py",
        "    if isinstance(value, dict) or isinstance(value, list) and _objects(value):\n",
        "    if isinstance(value, bytes):\n",
        ["tests/rewards/test_rule_rewards.py", "-k", "objects"],
    ),
    "a loop of the sampler has a condition of each run": (
        "rljax/sampler/slots.py",
        "(steps_done < steps) & highest_of_runs((live > 0) & (count - live < enough_free))",
        "(steps_done < steps) & (live > 0) & (count - live < enough_free)",
        ["tests/sampler/test_runs_in_one_program.py"],
    ),
    "a draw has a branch of each run": (
        "rljax/sampler/draw.py",
        "return highest_of_runs(jnp.where(jnp.any(_is_ruled(rules)), 2, greedy))",
        "return jnp.where(jnp.any(_is_ruled(rules)), 2, greedy)",
        ["tests/sampler/test_runs_in_one_program.py"],
    ),
    "weights that are NaN are loaded": (
        "rljax/models/huggingface/load.py",
        "            require_finite(out, file, name, at)\n",
        "",
        ["tests/models/test_bad_weights.py", "-k", "finite"],
    ),
    "rows that a stream drops are not counted": (
        "rljax/data/online/loader.py",
        "        self.counts.update(counts)\n        self._warn()\n",
        "        self._warn()\n",
        ["tests/data/test_stored.py"],
    ),
    "a prompt beside conversations is not compared": (
        "rljax/data/rows/unread.py",
        "        if read and isinstance(row.get(read), str) and not isinstance(prompt, str):\n",
        "        if False:\n",
        ["tests/data/test_unread_columns.py", "tests/data/test_preference_rows.py"],
    ),
    "a margin that no loss reads is not said": (
        "rljax/data/rows/unread.py",
        "            self._note(topic, columns, location, index)\n",
        "            pass\n",
        ["tests/data/test_unread_columns.py"],
    ),
    "a command's rows lose their tools": (
        "rljax/data/rows/columns.py",
        'PROMPT_COLUMNS = ("prompt", "tools", *VARIABLES)',
        'PROMPT_COLUMNS = ("prompt", *VARIABLES)',
        ["tests/datagen/test_rlaif.py"],
    ),
    "an empty message is no answer of a pair": (
        "rljax/data/rows/columns.py",
        " and not (empty and _says_nothing(learned)):",
        ":",
        ["tests/data/test_preference_rows.py"],
    ),
    "a null hides the other name of a column": (
        "rljax/data/rows/columns.py",
        "candidates = held or (filled if column.null_is_absent else row)",
        "candidates = filled if column.null_is_absent else row",
        ["tests/data/test_preference_rows.py"],
    ),
    "a conversation that ends in an answer takes it from the other": (
        "rljax/data/offline/rows.py",
        'if one_ends and n > 1 and contents[0][n - 1]["role"] == _ASSISTANT:',
        "if False:",
        ["tests/data/test_preference_rows.py"],
    ),
    "log-probs of the server are those of the draw": (
        "rljax/sampler/draw.py",
        "    if rules.raw_logprobs:\n",
        "    if False:\n",
        ["tests/serving/test_serving_scores.py"],
    ),
    "a metric that no step measures is the best one's": (
        "rljax/training/best_metric.py",
        "    if _declares(name, metrics, _prefixes(setup)):\n",
        "    if True:\n",
        ["tests/training/test_offline.py", "-k", "best"],
    ),
    "a null holds a ground truth": (
        "rljax/answer_columns.py",
        "if row.get(name) is not None]",
        "if name in row]",
        ["tests/data/test_prepare_data.py", "-k", "turn"],
    ),
    "a solution that is NaN holds a ground truth": (
        "rljax/answer_columns.py",
        "gap = value in ([], {}) or isinstance(value, float) and math.isnan(value)",
        "gap = value in ([], {})",
        ["tests/data/test_own_files.py", "-k", "solution"],
    ),
    "a solution is no ground truth": (
        "rljax/answer_columns.py",
        '("ground_truth", "answer", "solution")',
        '("ground_truth", "answer")',
        ["tests/data/test_prepare_data.py", "-k", "turn"],
    ),
    "an answer of 32 bits is read with 64": (
        "rljax/config/answer_numbers.py",
        "    return value if few_bits and is_whole or imprecise and (few_bits or is_whole) else nearest\n",
        "    return value\n",
        ["tests/data/test_array_rows.py", "-k", "few_bits"],
    ),
    "a box of a reference is compared as it stands": (
        "rljax/rewards/text/rules.py",
        "    accepted += [reference_answer(target) for target in accepted]\n",
        "    pass\n",
        ["tests/rewards/test_rule_rewards.py", "-k", "reference"],
    ),
    "an entry of extra_info hides the ground truth": (
        "rljax/rewards/pool/foreign.py",
        "    if truth is not None and not (isinstance(truth, str) and not truth):  # there is one\n",
        "    if truth is not None and isinstance(truth, bytes):\n",
        ["tests/rewards/test_foreign_rewards.py", "-k", "entries"],
    ),
    "a foreign reward gets the text of a list": (
        "rljax/rewards/pool/foreign.py",
        "    value = truth.value if isinstance(truth, GroundTruth) else truth\n",
        "    value = truth\n",
        ["tests/rewards/test_foreign_rewards.py", "-k", "truth"],
    ),
    "reasoning in a column is left out": (
        "rljax/data/offline/rows.py",
        "    require_no_other_reasoning(row, record, location)\n",
        "",
        ["tests/data/test_rows_of_messages.py", "-k", "reasoning"],
    ),
    "a tool is not awaited": (
        "rljax/environments/toolbox.py",
        '            return _as_text(awaited(tool.function(**arguments))), ""\n',
        '            return _as_text(tool.function(**arguments)), ""\n',
        ["tests/environments/test_tools.py", "-k", "async"],
    ),
    # -- runs that are trained together
    "every run goes on with the weights of the first": (
        "rljax/training/together.py",
        "    return [jax.tree.map(lambda x, i=i: x[i], new_roles) for i in range(len(own))], out\n",
        "    return [jax.tree.map(lambda x: x[0], new_roles) for i in range(len(own))], out\n",
        ["tests/training/test_together.py", "-k", "place_of_a_run"],
    ),
    "runs that have ended make another program": (
        "rljax/training/together.py",
        "        padding = self.count - len(runs)\n",
        "        padding = 0\n",
        ["tests/training/test_together.py", "-k", "place_of_a_run"],
    ),
    "runs of other settings are trained by the first one's program": (
        "rljax/training/together.py",
        "        if differ := sorted(name for name in first if first[name] != other[name]):\n",
        "        if differ := []:\n",
        ["tests/training/test_together.py", "-k", "refused"],
    ),
    "all runs of a program learn at the rate of the first": (
        "rljax/training/program_steps.py",
        "        fields = {**dict(made_of.fields), **numbers_of(made_of.section, numbers)}\n",
        "        fields = dict(made_of.fields)\n",
        ["tests/training/test_together.py", "-k", "place_of_a_run"],
    ),
    "all runs of a program clip as the first does": (
        "rljax/training/run_numbers.py",
        "        fields[name] = tuple(components) if many else components[0]\n",
        "",
        ["tests/training/test_together.py", "-k", "place_of_a_run"],
    ),
    "all runs of a program sample at the temperature of the first": (
        "rljax/rollout/on_device.py",
        "            temperature=self.temperature if is_own else None,\n",
        "",
        ["tests/training/test_together.py", "-k", "place_of_a_run"],
    ),
    "an interval of each seed is taken for one of all looks": (
        "rljax/report/arms.py",
        "    ratio = (math.sqrt(total / _MIXED) / (1 - LEVEL)) ** (2 / n)\n",
        "    ratio = (1 / (1 - LEVEL)) ** (2 / n)\n",
        ["tests/experiments/test_until.py"],
    ),
    "a question is answered by seeds of one setting": (
        "rljax/experiments/until.py",
        "        gains = [better[seed] - worse[seed] for seed in better if seed in worse]\n",
        "        gains = list(better.values())\n",
        ["tests/experiments/test_until.py"],
    ),
    # -- several steps in one program
    "steps of a program have one key": (
        "rljax/training/program_steps.py",
        "        steps = range(first, first + len(prompts))\n",
        "        steps = [first] * len(prompts)\n",
        [PROGRAM, "-k", "bitwise"],
    ),
    "a program goes beyond an evaluation": (
        "rljax/training/program_steps.py",
        "            count = min(count, period - at_step % period) if period else count\n",
        "            pass\n",
        [PROGRAM, "-k", "as_many"],
    ),
    "a rollout draws the prompts of the step again": (
        "rljax/training/program_steps.py",
        "        start = count + sum(counts)\n",
        "        start = sum(counts)\n",
        [PROGRAM, "-k", "ones_own"],
    ),
    "a row without a score is learned from": (
        "rljax/rollout/on_device.py",
        '    ok = jnp.isfinite(scores["score"])\n',
        '    ok = jnp.ones(scores["score"].shape, bool)\n',
        [PROGRAM, "-k", "cannot_decide"],
    ),
    "marks of reasoning are read as an answer": (
        "rljax/rewards/on_device/scorer.py",
        "                decided &= ~contains(lowered, sign)\n",
        "                pass\n",
        [ON_DEVICE, "-k", "cannot_decide"],
    ),
    "a mark that is a special token is left out of the text": (
        "rljax/rewards/on_device/scorer.py",
        "            self.unknown[[i for i in mark_ids(tokenizer) if i < vocab_size]] = True\n",
        "            pass\n",
        [ON_DEVICE, "-k", "special_token"],
    ),
    "reasoning that a prompt has begun is an answer": (
        "rljax/rewards/on_device/scorer.py",
        "        for text, messages in prompts if self.cuts else ():\n",
        "        for text, messages in ():\n",
        [ON_DEVICE, "-k", "begins_the_reasoning"],
    ),
    "a text of the device keeps what stands around the response": (
        "rljax/rewards/on_device/scorer.py",
        "        ids = jnp.where(column < count[:, None], ids, 0)\n",
        "        count = count + 1\n",
        [ON_DEVICE, "-k", "every_row"],
    ),
    "a search begins anew at each character": (
        "rljax/rewards/on_device/automaton.py",
        "        graph.edge(first, any_byte, first)\n",
        "        pass\n",
        [ON_DEVICE, "-k", "as_re_finds"],
    ),
    "half of a pair of bytes is a text": (
        "rljax/rewards/on_device/scorer.py",
        "        if self.has_parts:  # which may make up no character\n",
        "        if False:\n",
        [ON_DEVICE, "-k", "vocabulary"],
    ),
    # -- the modules beside the rooms
    "rows that do not divide are split": (
        "rljax/arrays.py",
        "np.ndim(x) > 0 and np.shape(x)[0] % row_shards(mesh) == 0",
        "np.ndim(x) > 0 and np.shape(x)[0] >= row_shards(mesh)",
        ["tests/test_arrays.py"],
    ),
    "what is on other devices of a mesh stays there": (
        "rljax/arrays.py",
        "x.committed and x.sharding.device_set != devices",
        "x.committed and not x.sharding.device_set & devices",
        ["tests/test_arrays.py"],
    ),
    "moved bytes of weights are those of all weights": (
        "rljax/arrays.py",
        "size = sum(x.nbytes for x in waiting)",
        "size = sum(x.nbytes for x in jax.tree.leaves(params))",
        ["tests/test_arrays.py"],
    ),
    "a core has the memory of its chip": (
        "rljax/chips.py",
        "return chip and chip.part(1 + max(device.core_on_chip for device in devices))",
        "return chip",
        ["tests/test_chips.py"],
    ),
    "a GiB of a chip is a GB": (
        "rljax/chips.py",
        "GIB = 2**30\n",
        "GIB = 10**9\n",
        ["tests/test_chips.py"],
    ),
    "a device of v5e has the figures of v5p": (
        "rljax/chips.py",
        '"TPU v5 lite": "v5e"',
        '"TPU v5 lite": "v5p"',
        ["tests/test_chips.py"],
    ),
    "a control character of a value reaches the terminal": (
        "rljax/errors.py",
        "super().__init__(_readable(text))",
        "super().__init__(text)",
        ["tests/command/test_command.py", "-k", "escape"],
    ),
    "an error of another process loses its text": (
        "rljax/errors.py",
        "        return self.of_text, self.args\n",
        "        return type(self), self.args\n",
        ["tests/test_components.py", "-k", "pickled"],
    ),
    "an error is where it was last passed on": (
        "rljax/errors.py",
        "for one in chain[-1:] if innermost else reversed(chain):",
        "for one in chain:",
        ["tests/test_components.py", "-k", "cause"],
    ),
    "compiling says how long a phase may take": (
        "rljax/heartbeat.py",
        "    if not _beats.compiled:  # compiling",
        "    if True:  # compiling",
        ["tests/hosts/test_watchdog.py", "-k", "limits"],
    ),
    "what clears up behind an error is where it came from": (
        "rljax/heartbeat.py",
        "_beats.died_in = _beats.died_in or name",
        "_beats.died_in = name",
        ["tests/hosts/test_watchdog.py"],
    ),
    "a limit is the slowest time so far": (
        "rljax/heartbeat.py",
        "TIMES * slowest + EXTRA_S",
        "slowest",
        ["tests/hosts/test_watchdog.py", "-k", "limits"],
    ),
    "a value at its bound is unhealthy": (
        "rljax/metric.py",
        "return low - SLACK <= value <= high + SLACK",
        "return low < value < high",
        ["tests/correction/test_correction.py", "tests/tracking/test_report.py", "-k", "health"],
    ),
    "the pattern of a metric is the shortest that fits": (
        "rljax/metric.py",
        "pattern = max(fitting, key=len)",
        "pattern = min(fitting, key=len)",
        ["tests/tracking/test_glossary.py"],
    ),
    "a metric of held-out rows is that of training": (
        "rljax/metric.py",
        'where = "of held-out rows" if prefix == "eval" else f"of {prefix}"',
        'where = f"of {prefix}"',
        ["tests/tracking/test_glossary.py"],
    ),
    "names resemble each other by any of their words": (
        "rljax/suggest.py",
        "if (least := min(least, _likeness_of_words(*pair))) < _NEAR:\n                break",
        "if (least := _likeness_of_words(*pair)) >= _NEAR:\n                break",
        ["tests/validation/test_names_of_others.py"],
    ),
    "the first words of a dotted name are those of a field": (
        "rljax/suggest.py",
        'ends = (".".join(parts[i:]) for i in range(len(parts)))',
        'ends = (".".join(parts[i:]) for i in reversed(range(len(parts))))',
        ["tests/validation/test_names_of_others.py"],
    ),
    "letters that changed their places are another word": (
        "rljax/suggest.py",
        "    if len(word) > 2 and sorted(word) == sorted(other):",
        "    if False:",
        ["tests/validation/test_names_of_others.py", "-k", "one_by_one"],
    ),
    "an unfinished thought is an answer": (
        "rljax/reasoning.py",
        '    if not ended:\n        return ""\n',
        "    if not ended:\n        return None\n",
        ["tests/rewards/test_reasoning.py"],
    ),
    "a mark in a quotation begins reasoning": (
        "rljax/reasoning.py",
        "                quoted_to = end\n                continue\n",
        "                quoted_to = end\n",
        ["tests/rewards/test_reasoning.py"],
    ),
}


# Of the rooms of a step.
BREAKS |= {
    "top_p counts from the mass of the whole vocabulary behind top_k": (
        "rljax/sampler/draw.py",
        "        target_mass = rules.top_p * jnp.where(by_count, jnp.sum(remaining, axis=-1), mass)\n",
        "        target_mass = rules.top_p * mass\n",
        ["tests/sampler/test_sampler.py", "-k", "sets_that_sorting"],
    ),
    "min_p goes by the whole mass": (
        "rljax/sampler/draw.py",
        "    min_weight = rules.min_p * jnp.max(weights, axis=-1)\n",
        "    min_weight = rules.min_p * jnp.sum(weights, axis=-1)\n",
        ["tests/sampler/test_sampler.py", "-k", "sets_that_sorting"],
    ),
    "a row that a baseline filter drops stays in its group": (
        "rljax/dataflows/steps.py",
        "group=jnp.where(keep > 0, batch.group, own_group)",
        "group=batch.group",
        ["tests/dataflows/test_stages.py"],
    ),
    "what a correction rejects is learned": (
        "rljax/dataflows/steps.py",
        "batch.replace(mask=batch.mask * accepted.mask)",
        "batch.replace(mask=batch.mask)",
        ["tests/dataflows/test_stages.py"],
    ),
    "a reward is penalised before it is shaped": (
        "rljax/dataflows/steps.py",
        "    return apply_kl_penalty(apply_shaping(batch, cfg.reward_shaping), cfg, kl_controller)\n",
        "    return apply_shaping(apply_kl_penalty(batch, cfg, kl_controller), cfg.reward_shaping)\n",
        ["tests/dataflows/test_stages.py"],
    ),
    "a group that a failure has ended makes room for no other": (
        "rljax/rollout/flight/tickets.py",
        "        return most - self.trained - self.failed - len(self.open)\n",
        "        return most - self.trained - len(self.open)\n",
        ["tests/rollout/test_tickets.py"],
    ),
}


def caught_by(copy: Path, file: str, old: str, new: str, arguments: list[str]) -> tuple[bool, str]:
    """Returns (whether a test of a clone fails for a break, the test or why none does). A clone that
    cannot be imported fails for another reason than the break, and counts as not caught."""
    path, environment = copy / file, {**os.environ, "PYTHONPATH": str(copy)}
    whole = path.read_text()
    if whole.count(old) != 1:
        return False, f"{file} has the text {whole.count(old)} times"
    path.write_text(whole.replace(old, new))
    command = [sys.executable, "-m", "pytest", "-n", "0", "-x", "-q", *arguments]
    done = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True)
    path.write_text(whole)
    lines = [x for x in done.stdout.splitlines() if x.startswith(("FAILED", "ERROR"))]
    failed = [line for line in lines if "::" in line.partition(" - ")[0]]
    if failed:
        return done.returncode == 1, failed[0]
    return False, f"NO TEST RUNS: {lines[0]}" if lines else "NO TEST FAILS"


def main(*parts: str) -> int:
    chosen = {
        name: one
        for name, one in BREAKS.items()
        if not parts or any(part in name or part in one[0] for part in parts)
    }
    if not chosen:
        print(f"no break has {' or '.join(parts)} in its name or its file\n\n{__doc__}")
        return 2
    copies, survived = queue.SimpleQueue(), []
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(os.cpu_count()) as threads:
        for number in range(os.cpu_count()):
            copy = Path(folder) / str(number) / "rljax"
            subprocess.run(["git", "clone", "-q", str(REPO), str(copy)], check=True)
            copies.put(copy)

        def run(name: str) -> None:
            copy = copies.get()
            caught, said = caught_by(copy, *chosen[name])
            copies.put(copy)
            print(f"{name}: {said}", flush=True)
            survived.extend([] if caught else [name])

        list(threads.map(run, chosen))
    print(json.dumps({"breaks": len(chosen), "survived": sorted(survived)}))
    return bool(survived)


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))
