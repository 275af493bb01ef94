"""The papers' timing models, against numbers of the papers and against what they are the solutions of."""
from typing import Any, Dict

import pytest

from scripts.maintain import timing, timing_models
from tests.jobs import ROOT


def averaged(T_cop: float, T_com: float, one_after_the_other: bool) -> float:
    """An iteration of OD-SGD by its dependencies: gradient t at c[t], the answer to its exchange at a[t]."""
    c, a = [0.0, T_cop], [0.0, T_cop + T_com]
    for _ in range(400):
        c.append(max(c[-1], a[-2]) + T_cop)
        a.append((max(c[-1], a[-1]) if one_after_the_other else c[-1]) + T_com)
    return (c[-1] - c[-201]) / 200


@pytest.mark.parametrize("T_com", [0.5, 1.0, 1.5, 2.0, 4.0])
def test_eq_2_of_od_sgd_lets_two_exchanges_overlap_and_the_limit_does_not(T_com: float) -> None:
    assert averaged(1.0, T_com, one_after_the_other=False) == pytest.approx(timing.T_new(1.0, T_com))
    assert averaged(1.0, T_com, one_after_the_other=True) == pytest.approx(timing.limit(1.0, T_com))


@pytest.mark.parametrize("T_com", [0.5, 1.0, 3.0])
def test_eq_3_of_od_sgd_is_eq_1_of_the_times_of_eq_2(T_com: float) -> None:
    by_times = timing.IMP_Rate(timing.T_org(1.0, T_com), timing.T_new(1.0, T_com))
    assert timing.IMP_Rate_of_times(1.0, T_com, T_com) == pytest.approx(by_times)
    assert by_times <= 0.5, "the paper's observation 3"


def test_eq_7_of_od_sgd_gives_the_bars_of_its_figures_17_and_18() -> None:
    ssgd, odsgd = timing_models.table_5("ssgd"), timing_models.table_5("odsgd")
    gains = {row: round(timing.GR_Rate(1 / odsgd[row], 1 / ssgd[row]), 1) for row in ssgd}
    assert gains == {("Ethernet", 4): 56.1, ("InfiniBand", 4): 30.8, ("Ethernet", 8): 32.2, ("InfiniBand", 8): 39.6,
                     ("Ethernet", 12): 36.0, ("InfiniBand", 12): 26.7}


def test_the_ratio_of_the_delayed_update_is_two_at_most() -> None:
    assert timing.R_WS(1.0, 1.0) == 2 > timing.R_WS(1.0, 0.92) == pytest.approx(1.92) == timing.R_WS(0.92, 1.0)


def test_the_models_of_pipe_sgd_agree_where_they_must() -> None:
    """Eq. 4 with K = 2 is at least Eq. 3; Eq. 5 is Eq. 4 with the ring's time, and Eq. 6 with one segment is Eq. 5."""
    ring: Dict[str, Any] = dict(p=4, alpha=1e-3, n=1e6, beta=1e-8, gamma=1e-9, S=1e-3)
    l_comm = timing.l_ring(**ring)
    assert l_comm == pytest.approx(6e-3 + 1.5e-2 + 0.75e-3 + 1e-3)
    for l_comp in (0.01, l_comm, 0.1):
        once = timing.l_total_pipe(1, 0.0, l_comp, l_comm)
        assert timing.l_total_pipe_unlimited(1, 2, 0.0, l_comp, l_comm) <= once
        assert once <= timing.l_total_sync(1, 0.0, l_comp, l_comm)
        assert timing.SE(0.0, l_comp, l_comm) == pytest.approx(l_comp / once)
        assert once == timing.l_total_pipe_s(1, 0.0, 0.0, l_comp, **ring)
        assert once == timing.l_total_pipe_p(1, 0.0, 0.0, l_comp, L=1, **ring)


def test_od_sgds_column_of_table_5_follows_within_10_per_cent_from_ssgds_and_one_number() -> None:
    """The number is OD-SGD on InfiniBand with 4 workers. Eq. 2 and max(T_cop, T_com) know the same, and are far off."""
    rho, org, new = timing_models.rho_of_row(4), timing_models.table_5("ssgd"), timing_models.table_5("odsgd")
    assert timing_models.worst(rho) < 0.1
    T_cop = new["InfiniBand", 4]
    for model in (timing.T_new, timing.limit):
        assert max(abs(new[row] / model(T_cop, org[row] - T_cop) - 1) for row in org) > 0.5
    for row, split in timing_models.predicted_by_two_networks(rho).items():
        assert sum(split) == pytest.approx(org[row]) and min(split) > 0


def test_the_page_is_what_the_script_writes() -> None:
    """To write it anew: scripts/maintain/timing_models.py, as the numbers in docs/results/benchmarks are part of it."""
    page = (ROOT / "docs" / "results" / "timing-models.md").read_text(encoding="utf-8")
    assert timing_models.written(page) == page
