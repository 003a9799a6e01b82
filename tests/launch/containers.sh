# The containers of a learner, or a script, and a worker, as a kubelet would run them: preempted once, then to the end.
# Run in namespaces of its own (mounts, network, processes) and in an empty directory, by test_kubernetes.py.
set -eu
mount --make-rprivate /
umount -l /sys/fs/cgroup/unified 2> /dev/null || true # crun takes no mixture of both versions
ip link set lo up; mount -t tmpfs none /run
printf '127.0.0.1 localhost %s\n' "$NAME" > hosts
fill() { # a Secret's volume as kubelet makes it: links into a directory that it can replace
    mkdir -p $1/..at
    (cd $PWD/../keys && for file in $2; do to=$1/..at/$file; mkdir -p ${to%/*}; install -m 0440 -g 1000 $file $to; done)
    ln -s ..at $1/..data
    for file in $(ls $1/..at); do ln -s ..data/$file $1/$file; done
}
build() { # the root directory of a container: what this machine has, for reading
    mkdir -p $1; mount -t tmpfs none $1
    mkdir -p $1/proc $1/tmp $1/keys $1/runs $1/dev
    mount -t tmpfs -o mode=1777 none $1/tmp
    for place in /usr /bin /sbin /lib /lib64 /etc $PLACES; do
        if [ -L $place ]; then cp -d $place $1$place; elif [ -e $place ]; then
            mkdir -p $1$place; mount --bind $place $1$place; mount -o remount,bind,ro $1$place
        fi
    done
    mkdir -p $1/sys $1/run; touch $1/run/.containerenv
    mount --bind $PWD/hosts $1/etc/hosts
    mount -t proc none $1/proc; mount --rbind /dev $1/dev; mount --bind $PWD/runs $1/runs
    fill $1/keys "$2"
    mount -o remount,ro $1
}
by_chroot() {
    exec chroot --userspec=1000:1000 --groups=1000 $1 /usr/bin/env -i HOME=/tmp PATH=$PATH PYTHONPATH=$PYTHONPATH \
        PYTHONDONTWRITEBYTECODE=1 sh -c "$2" > $1.log 2>&1
}
by_podman() {
    exec podman --root /run/store --runroot /run/at --tmpdir /run/tmp --events-backend none run --rm --network host \
        --no-hosts --cgroups disabled --ulimit host --user 1000:1000 --cap-drop all --security-opt no-new-privileges \
        --read-only --read-only-tmpfs=false -e HOME=/tmp -e PATH=$PATH -e PYTHONPATH=$PYTHONPATH \
        -e PYTHONDONTWRITEBYTECODE=1 --rootfs $1 sh -c "$2" > $1.log 2>&1
}
mkdir runs; chown 1000:1000 runs
build $PWD/learner "learner.key_secret learner.key admitted/worker.key"
build $PWD/worker "worker.key_secret learner.key"
($HOW $PWD/worker "$WORKER") & worker=$!
($HOW $PWD/learner "$LEARNER") & learner=$!
until eval "$BEGUN"; do kill -0 $learner; sleep 0.2; done
chroot $PWD/learner grep -qs "$LISTENS" /proc/net/tcp; chroot $PWD/worker grep -qs "$CONNECTED" /proc/net/tcp
! chroot --userspec=1000:1000 $PWD/learner touch /usr/it 2> /dev/null
kill -TERM $learner; status=0; wait $learner || status=$?; echo preempted $status
($HOW $PWD/learner "$LEARNER") & learner=$!
status=0; wait $learner || status=$?; echo learner $status
status=0; wait $worker || status=$?; echo worker $status
