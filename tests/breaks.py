"""Puts the causes of defects back, one at a time, and sees a test fail for each:

    python tests/breaks.py [PART_OF_A_NAME ...]

Each break is an exact text of a file and what stands in its place; a copy of the last commit is
changed, never this checkout. Exit code 1 where a break makes no test fail, or is in no file any
more. Every night, not in the normal lane: each break runs its tests anew.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent
CHAT, CONTENTS = "rljax/data/text/chat.py", "rljax/data/text/contents.py"
PUBLISHED = "tests/data/test_published_templates.py"
TEMPLATES = "tests/data/test_chat_templates.py"
TRUST, ORDERS = "rljax/config/trust.py", "tests/data/test_recorded_orders.py"
HUB, HOSTILE = "rljax/hub/client.py", "tests/hub/test_hostile_hub.py"
# name: (file, the text, what stands in its place, pytest's arguments)
BREAKS = {
    "the end of turn is no stop token": (
        "rljax/data/text/tokenizer.py",
        "        self._join_turn_ends()\n",
        "",
        [PUBLISHED],
    ),
    "a stop token of the next role is not learned": (
        CHAT,
        "            return rest[slice(*offsets[0])], written\n",
        "            return '', written\n",
        [PUBLISHED, "-k", "glm4_5"],
    ),
    "what stands behind the stop token is learned": (
        CHAT,
        "        return _Turn(before, written + end, len(end), through)\n"
        "    return _Turn(before, ended, 0, through)\n",
        "        return _Turn(before, written + end, len(end), through)\n"
        "    return _Turn(before, written, 0, through)\n",
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
        '    header = re.sub(rf"({_EMPTY})\\s*$", "", header)\n',
        "    header = through\n",
        ["tests/data/test_chat.py", "-k", "supplies"],
    ),
    "the reasoning of a turn behind <think> is lost": (
        CHAT,
        '    return f"{reasoning}{apart}{close}{2 * apart}{rest}"\n',
        "    return rest\n",
        ["tests/data/test_chat.py", "-k", "supplies"],
    ),
    "a rewritten turn is learned": (
        CHAT,
        '    raise _rewritten(f"message {k}", whole, text)\n',
        "    return text, spans\n",
        ["tests/data/test_chat.py", TEMPLATES],
    ),
    "a greeting is learned": (
        CHAT,
        "        return k > 0 and bool(_prompt(tokenizer, messages, k, options))\n",
        "        return True\n",
        ["tests/data/test_chat.py", "-k", "greeting"],
    ),
    "a token spans the border of prompt and turn": (
        CHAT,
        "            made, spans = encode_after(tokenizer, (ids or prompt)[-1], text)\n",
        "            made, spans = tokenizer.encode_with_offsets(text)\n",
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
        '    for what, piece in [("reasoning", reasoning), *_said(tokenizer, message, answer)]:\n',
        "    for what, piece in []:\n",
        [TEMPLATES],
    ),
    "what is read is not compared with the row": (
        CONTENTS,
        "            if not _within(piece, squeezed):\n                raise _left_out(number, message, what, piece)\n"
        "    for number, what in",
        "            if False:\n                raise _left_out(number, message, what, piece)\n"
        "    for number, what in",
        ["tests/data/test_contents.py"],
    ),
    "short texts are looked for and not probed": (
        CONTENTS,
        "    if not (odd or tools or any(calls)) or tokenizer.image_mark:\n",
        "    if True:\n",
        ["tests/data/test_contents.py"],
    ),
    "the flags of a message are dropped": (
        "rljax/data/rows/conversation.py",
        "        said[LEARN] = False\n",
        "        pass\n",
        ["tests/data/test_rows_of_messages.py"],
    ),
    "nulls of a table reach calls": (
        "rljax/data/rows/nulls.py",
        "{**message, name: self._calls(message[name], tools)}",
        "message",
        ["tests/data/test_rows_of_messages.py"],
    ),
    "arguments stay JSON text": (
        "rljax/data/text/messages.py",
        'for_template(messages), "chat messages"',
        'messages, "chat messages"',
        ["tests/data/test_rows_of_messages.py", "tests/serving/test_tool_calls.py"],
    ),
    "variables of a row are dropped": (
        "rljax/data/rows/columns.py",
        '    return made | ({"variables": variables} if variables else {})\n',
        "    return made\n",
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
        "        if token != theirs.get(i)\n",
        "        if False\n",
        ["tests/setup/test_same_ids.py"],
    ),
    "an export stops where the base does": (
        "rljax/setup/images.py",
        "{**ids, **written, **kept, **ends}",
        "{**ids, **written, **ends, **kept}",
        ["tests/setup/test_exports.py"],
    ),
    "data.turns is not read by offline rows": (
        "rljax/data/online/encoded.py",
        "        turns=config.data.turns,\n",
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
        "functools.partial(_attempt, items.make)",
        "items.make",
        ["tests/data/test_stream.py"],
    ),
    "a stream drops all turns but the first": (
        "rljax/data/online/prompts.py",
        "    if len(made) == 1:\n",
        "    if made:\n",
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
        "    if found is not None:\n        return found\n",
        "",
        [PUBLISHED, "-k", "agent"],
    ),
    "a template of parts gets texts": (
        "rljax/data/text/template.py",
        "        return written[0] > 0 or not written[1]\n",
        "        return True\n",
        [PUBLISHED, "-k", "short_texts or idefics3"],
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
        "            return None\n        folders",
        "            pass\n        folders",
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
        "        if left < 0:\n",
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
        "        if not inside:",
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
        "max(_WHY_DROPPED, key=lambda name: counts.get(name, 0))",
        "'dropped_overlong'",
        ["tests/data/test_own_files.py"],
    ),
    "a table is always separated by commas": (
        "rljax/data/rows/read.py",
        "if one in first), own)",
        "if one in 'a,'), own)",
        ["tests/data/test_own_files.py"],
    ),
    "rows of another kind lead nowhere": (
        "rljax/data/rows/columns.py",
        "        if columns <= has and not columns & set(lacking):\n",
        "        if False:\n",
        ["tests/data/test_own_files.py"],
    ),
    "a solution is the answer whole": (
        "rljax/data/rows/sources.py",
        "    marked = last_boxed(solution) or ",
        "    marked = solution or ",
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
        "        if not more:\n            break\n        changes = ",
        "        break\n        changes = ",
        ["tests/plan/test_plan.py", "-k", "largest"],
    ),
    "a worker's error has two fixes": (
        "rljax/workers/function.py",
        "    if known:\n",
        "    if False:\n",
        ["tests/rewards/test_reward_pool.py", "-k", "cannot_be_loaded"],
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
        "is_harmless(match[1] if match else text, home)",
        "match is None or is_harmless(match[1], home)",
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
        "        keep = keep * (1 - vetoed)\n",
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
        "stats = stats._replace(best=stats.best + first)",
        "pass",
        ["tests/kernels/test_logprob.py", "-k", "float64"],
    ),
    "the trainer reads rows of a head that have no token": (
        "rljax/models/model.py",
        "entries=self.config.known_ids,",
        "entries=0,",
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
        "return head * tall + 2 * pair + half",
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
        "penalty * (jnp.maximum(over, -1.0) if floor else over)",
        "penalty * over",
        ["tests/shaping/test_sampling_rules.py", "-k", "overlong"],
    ),
    "wrong rows are charged for their length": (
        "rljax/shaping/scores.py",
        "right = batch.scores >= correct_at",
        "right = batch.scores >= 0",
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
        '"tokens": jnp.sum(jnp.where(kept, chosen, 0.0), axis=0)',
        '"tokens": jnp.sum(chosen, axis=0)',
        ["tests/models/test_experts.py", "-k", "padding"],
    ),
    "the tokenizer is a part of a role's program": (
        "rljax/roles/models.py",
        "    return dataclasses.replace(role, decoding=Decoding())\n",
        "    return role\n",
        ["tests/training/test_compile_count.py", "-k", "equal_run"],
    ),
    "a step leaves the actor without its way of decoding": (
        "rljax/roles/models.py",
        "        return dataclasses.replace(new, decoding=self.decoding)\n\n    def generate(\n"
        "        self,\n        prompts,\n        key,\n        sampling: Sampling,\n        *,\n"
        "        n: int = 1,\n        finished: Callable | None = None,\n"
        "        stop: Callable[[], bool] | None = None,\n        second",
        "        return new\n\n    def generate(\n"
        "        self,\n        prompts,\n        key,\n        sampling: Sampling,\n        *,\n"
        "        n: int = 1,\n        finished: Callable | None = None,\n"
        "        stop: Callable[[], bool] | None = None,\n        second",
        ["tests/training/test_compile_count.py", "-k", "twelve"],
    ),
    "a step that is not finite is taken": (
        "rljax/learn/state.py",
        "_changed(optimizer, gradient, state, finite & take, layout)",
        "_changed(optimizer, gradient, state, take, layout)",
        ["tests/training/test_faults.py", "-k", "not_finite"],
    ),
    "steps in a row are counted over good ones": (
        "rljax/learn/state.py",
        "skipped_in_a_row=jnp.where(taken, 0, in_a_row),",
        "skipped_in_a_row=in_a_row,",
        ["tests/training/test_faults.py", "-k", "not_finite"],
    ),
    "the position of the data is not resumed": (
        "rljax/training/run.py",
        "        source.set_state(saved)\n",
        "        pass\n",
        ["tests/training/test_resume.py", "-k", "mid_step"],
    ),
    "the implicit model learns from rows that the filter drops": (
        "rljax/dataflows/prime.py",
        "implicit.update(filter_baseline_rows(batch, cfg), loss, **options)",
        "implicit.update(batch, loss, **options)",
        ["tests/dataflows/test_prime.py"],
    ),
    "a failed sample is the best of its prompt": (
        "rljax/shaping/pairs.py",
        "    best = jnp.argmax(jnp.where(live, scores, -jnp.inf), axis=1)\n",
        "    best = jnp.argmax(scores, axis=1)\n",
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
        "    branch = sample.outcome_alone().branch\n",
        "    branch = sample.branch\n",
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


def main(*parts: str) -> int:
    survived = []
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "rljax"
        subprocess.run(["git", "clone", "-q", str(REPO), str(copy)], check=True)
        environment = {**os.environ, "PYTHONPATH": str(copy)}
        for name, (file, old, new, arguments) in BREAKS.items():
            if parts and not any(part in name for part in parts):
                continue
            path = copy / file
            whole = path.read_text()
            if whole.count(old) != 1:
                print(f"{name}: {file} has the text {whole.count(old)} times", flush=True)
                survived.append(name)
                continue
            path.write_text(whole.replace(old, new))
            command = [sys.executable, "-m", "pytest", "-n", "0", "-x", "-q", *arguments]
            done = subprocess.run(
                command, cwd=copy, env=environment, capture_output=True, text=True
            )
            path.write_text(whole)
            failed = [
                line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))
            ]
            print(f"{name}: {failed[0] if failed else 'NO TEST FAILS'}", flush=True)
            survived += [] if done.returncode == 1 and failed else [name]
    print(json.dumps({"breaks": len(BREAKS), "survived": survived}))
    return bool(survived)


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))
