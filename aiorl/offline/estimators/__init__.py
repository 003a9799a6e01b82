"""What a policy would earn, judged on episodes that another policy played.

- `likelihoods`: how likely either policy's actions were.
- `importance`: IS and WIS of a run's workers, episode by episode as they are read (``input_evaluation``).
- `ratios`, `fitted_q`, `target`, `judgement`: five estimators over a whole data set (``python -m aiorl.estimate``).
"""

from aiorl.offline.estimators.importance import (
    ESTIMATORS,
    ImportanceSamplingEstimator,
    OffPolicyEstimate,
    OffPolicyEstimator,
    WeightedImportanceSamplingEstimator,
    episode_parts,
)
from aiorl.offline.estimators.likelihoods import ActionLikelihoods, action_log_likelihoods

__all__ = [
    "ESTIMATORS",
    "ActionLikelihoods",
    "ImportanceSamplingEstimator",
    "OffPolicyEstimate",
    "OffPolicyEstimator",
    "WeightedImportanceSamplingEstimator",
    "action_log_likelihoods",
    "episode_parts",
]
