#!/usr/bin/env bash
# What a GPU has to say, in at most eight minutes and without a download: the output law, cost curves
# of the shapes of Qwen3-4B and Qwen3-8B with their drafters, eager against compiled, plain decoding
# against the memory floor, replay against decoding. All figures end in one JSON file.
#
#   PYTHON=.venv/bin/python scripts/device_check.sh device_check.json
#   DEVICE=cpu scripts/device_check.sh device_check.json      # tiny shapes: does the script work?
set -euo pipefail
cd "$(dirname "$0")/.."
result=${1:?usage: scripts/device_check.sh <result.json>}
device=${DEVICE:-cuda}
python=${PYTHON:-python3}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} TOKENIZERS_PARALLELISM=false

"$python" - "$device" > "$work/versions.json" <<'CHECK'
import json, sys
import torch, transformers
device = sys.argv[1]
if device == "cuda" and not torch.cuda.is_available():
    sys.exit("device_check: no GPU; DEVICE=cpu tries the script on tiny shapes")
if int(transformers.__version__.split(".")[0]) < 5:
    sys.exit(f"device_check: transformers {transformers.__version__}, 5 or newer is needed")
gpu = torch.cuda.get_device_name() if device == "cuda" else None
print(json.dumps({"torch": torch.__version__, "transformers": transformers.__version__, "gpu": gpu}))
CHECK

tiny=(
  model.architecture.num_hidden_layers=4 model.architecture.hidden_size=32
  model.architecture.intermediate_size=48 model.architecture.num_attention_heads=4
  model.architecture.num_key_value_heads=2 model.architecture.head_dim=8
  model.architecture.vocab_size=300 +model.architecture.initializer_range=0.25
)
common=(weights=random drafter.checkpoint=random device="$device")
sizes='[1,2,4,8,14,15,16,17,18,24,32]'
contexts='[128,1024,4096]'
models=(qwen3-4b qwen3-8b)
engines=(eager compiled)
shape=(dtype=bfloat16) bench=()
if [ "$device" = cpu ]; then # one engine: inductor takes a minute per size on a CPU
  sizes='[1,16]' contexts='[32]' models=(qwen3-4b) engines=(eager)
  shape=("${tiny[@]}" dtype=float32) bench=(decoding.max_new_tokens=12)
fi

printf '{"id": "a", "turns": ["one"]}\n{"id": "b", "turns": ["two", "and then"]}\n' \
  > "$work/prompts.jsonl"
for engine in "${engines[@]}"; do
  # A sweep in float64 fails when any output differs from plain decoding.
  timeout 120 "$python" -m blockpilot.sweep mode=decode engine="$engine" run_id="law-$engine" \
    "${common[@]}" "${tiny[@]}" dtype=float64 prompts=local prompts.path="$work/prompts.jsonl" \
    decoding.temperature=1 decoding.max_new_tokens=12 radius=1 tracker=none \
    paths.outputs="$work" > /dev/null
  grid=("sizes=$sizes" "contexts=$contexts")
  # Every size and context is a graph of the target and one of the drafter, compiled first.
  if [ "$engine" = compiled ]; then grid=('sizes=[1,16]' 'contexts=[1024]') models=("${models[0]}"); fi
  for model in "${models[@]}"; do
    timeout 150 "$python" -m blockpilot.cost +model="$model" engine="$engine" \
      run_id="$model-$engine" "${common[@]}" "${shape[@]}" "${grid[@]}" \
      repeats=3 tracker=none paths.outputs="$work"
  done
done
timeout 150 "$python" scripts/bench.py +model="${models[0]}" "${common[@]}" "${shape[@]}" \
  "${bench[@]}" paths.outputs="$work"

"$python" - "$work" "$result" <<'MERGE'
import json, pathlib, sys
work, result = map(pathlib.Path, sys.argv[1:])
read = lambda path: json.loads(path.read_text())
merged = {
    "versions": read(work / "versions.json"),
    "law": sorted(path.name for path in (work / "sweep").iterdir()),
    "cost": {path.parent.name: read(path) for path in sorted(work.glob("cost/*/cost.json"))},
    "bench": read(next(work.glob("bench/*.json"))),
}
result.write_text(json.dumps(merged, indent=1) + "\n")
print(f"figures in {result}")
MERGE
