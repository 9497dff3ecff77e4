"""CPUs that a process may use, read from trees of control group files as kernels and runtimes lay them out."""

import os

import pytest
from lockstep_common.cpu_limit import usable_cpus

CPUS = len(os.sched_getaffinity(0))


@pytest.fixture
def limit(tmp_path):
    """The limit in a tree of files; None if there is none. Quotas here are below one CPU, so that the tests pass on any
    machine."""

    def read(membership, files):
        root = tmp_path / "cgroup"
        for name, content in files.items():
            file = root / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(content)
        (tmp_path / "membership").write_text(membership)
        found = usable_cpus(root, tmp_path / "membership")
        return None if found == CPUS else found

    return read


def v1(quota_us, folder, period_us=100_000):
    return {f"{folder}/cpu.cfs_quota_us": f"{quota_us}\n", f"{folder}/cpu.cfs_period_us": f"{period_us}\n"}


class TestVersion2:
    def test_a_container_with_a_namespace_sees_its_group_as_the_root(self, limit):
        assert limit("0::/\n", {"cpu.max": "50000 100000\n"}) == 0.5

    def test_a_fraction_is_kept(self, limit):
        assert limit("0::/\n", {"cpu.max": "73000 100000\n"}) == 0.73

    def test_other_periods_count(self, limit):
        assert limit("0::/\n", {"cpu.max": "20000 50000\n"}) == 0.4

    def test_max_is_no_limit(self, limit):
        assert limit("0::/\n", {"cpu.max": "max 100000\n"}) is None

    def test_the_tightest_of_the_groups_around_a_process_counts(self, limit):
        group = "0::/kubepods.slice/pod1.slice/container.scope\n"
        pod, container = "kubepods.slice/pod1.slice", "kubepods.slice/pod1.slice/container.scope"
        assert limit(group, {f"{pod}/cpu.max": "30000 100000", f"{container}/cpu.max": "max 100000"}) == 0.3
        assert limit(group, {f"{pod}/cpu.max": "30000 100000", f"{container}/cpu.max": "20000 100000"}) == 0.2

    def test_a_group_that_is_named_as_on_the_host_is_looked_for_at_the_root_too(self, limit):
        assert limit("0::/kubepods/pod1/abc\n", {"cpu.max": "60000 100000"}) == 0.6

    def test_neighbours_do_not_count(self, limit):
        assert limit("0::/a/b\n", {"a/c/cpu.max": "10000 100000", "a/b/cpu.max": "max 100000"}) is None

    def test_a_group_outside_the_namespace_leads_nowhere(self, limit):
        assert limit("0::/../../other\n", {"other/cpu.max": "max 100000", "cpu.max": "40000 100000"}) == 0.4


class TestVersion1:
    @pytest.mark.parametrize("mount", ["cpu", "cpu,cpuacct"])
    def test_a_quota_of_the_containers_group(self, limit, mount):
        assert limit("4:cpu,cpuacct:/\n", v1(50_000, mount)) == 0.5

    def test_minus_one_is_no_limit(self, limit):
        assert limit("1:cpu:/\n", v1(-1, "cpu")) is None

    def test_the_tightest_of_the_groups_around_a_process_counts(self, limit):
        files = v1(-1, "cpu") | v1(40_000, "cpu/kubepods/pod1") | v1(70_000, "cpu/kubepods/pod1/abc")
        assert limit("1:cpu:/kubepods/pod1/abc\n", files) == 0.4

    def test_a_group_that_is_named_as_on_the_host_is_looked_for_at_the_root_too(self, limit):
        assert limit("7:cpuacct,cpu:/docker/abc\n", v1(25_000, "cpu")) == 0.25

    def test_beside_version_2_both_are_read(self, limit):
        files = v1(80_000, "cpu") | {"cpu.max": "50000 100000"}
        assert limit("1:cpu:/\n0::/\n", files) == 0.5

    def test_other_controllers_have_no_say(self, limit):
        assert limit("2:cpuset:/\n4:memory:/x\n", v1(10_000, "cpuset")) is None


class TestWithoutALimit:
    @pytest.mark.parametrize(
        "content", ["", "max", "fast 100000", "100000", "0 100000", "50000 0", "-1 100000", "\x00", "5e4 100000"]
    )
    def test_a_file_that_says_nothing_usable_limits_nothing(self, limit, content):
        assert limit("0::/\n", {"cpu.max": content}) is None

    @pytest.mark.parametrize("membership", ["", "nonsense\n", "0::\n", "1:cpu\n"])
    def test_an_odd_membership_limits_nothing(self, limit, membership):
        assert limit(membership, {}) is None

    def test_without_control_groups_the_affinity_counts(self, tmp_path):
        assert usable_cpus(tmp_path / "none", tmp_path / "none") == CPUS

    def test_a_limit_above_the_affinity_is_none(self, limit):
        assert limit("0::/\n", {"cpu.max": f"{(CPUS + 1) * 100_000} 100000"}) is None


def test_affinity_is_a_limit():
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(before)})
        assert usable_cpus() <= 1
    finally:
        os.sched_setaffinity(0, before)
