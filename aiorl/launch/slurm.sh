## body
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
@others
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
@end
exit "$status"
## learner
# the learner of a node that was lost may still hold it, and ends when it is gone
if [[ ${SLURM_RESTART_COUNT:-0} != 0 && -e @lock ]]; then
    flock --timeout 300 @lock true || rm -f @lock
fi
@learner"$@" --bind @bind --keys @keys --num-workers @local &
## workers
@worker &
## step
if ((SLURM_JOB_NUM_NODES > 1)); then
    others=$((SLURM_JOB_NUM_NODES - 1))
    srun --nodes="$others" --ntasks="$others" --cpus-per-task="$SLURM_CPUS_PER_TASK" --exclude="$SLURMD_NODENAME" \
        --no-kill --kill-on-bad-exit=0 --wait=0 @worker &
fi
## end_array
scancel --quiet --name=@array --state=PENDING  # those that run hear the learner's goodbye
[[ $status == 0 ]] || scancel --quiet --name=@array
