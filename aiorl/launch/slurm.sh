set -u
@environment
again= ended= stopped= main=
pass_on() {  # the first signal only
    [[ -z $main || $again$ended$stopped != 1 ]] || kill "-$1" "$main"
}
trap 'again+=1; pass_on TERM' USR1  # time is nearly up, or preempted: ask for another turn
trap 'ended+=1; pass_on TERM' TERM  # scancel, or preempted: Slurm decides
trap 'stopped+=1; pass_on INT' INT  # aiorl launch slurm stop
echo "=== start ${SLURM_RESTART_COUNT:-0} of job $SLURM_JOB_ID on $SLURM_JOB_NODELIST"
@start
main=$!
[[ -z $again$ended$stopped ]] || kill -TERM "$main"  # a signal came early
@workers
# a signal that is trapped ends a wait
until before=$again$ended$stopped; status=0; wait "$main" || status=$?; [[ $before == "$again$ended$stopped" ]]; do
    :
done
echo "=== ended with status $status"
if [[ $status == 143 && -n $again ]]; then
    scontrol requeue "$SLURM_JOB_ID" && sleep 600
elif [[ -n $ended ]]; then
    sleep 600  # Slurm puts a preempted job back only if it has not ended by itself; scancel ends this
fi
@after
exit "$status"
