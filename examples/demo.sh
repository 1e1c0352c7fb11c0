# Render a bench JobSet out of a launcher's dry-run output and run that JobSet's own client command on the CPU.
set -eu
here=$(dirname "$0")
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT
echo "== render_bench.py --launch-render examples/launch_tiny.yaml --name demo --steps 3"
python "$here/../render_bench.py" --launch-render "$here/launch_tiny.yaml" --name demo --steps 3 > "$out/demo.yaml"
echo "== the rendered client command, on four virtual CPU devices"
status=0
BENCH_CPU_SMOKE=1 python "$here/run_client.py" "$out/demo.yaml" || status=$?
# Three steps run but support no claim: the driver says so and answers 1. Anything else is a failure.
[ "$status" -le 1 ] || exit "$status"
