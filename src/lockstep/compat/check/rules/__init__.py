"""The rules, in the order in which their findings are explained."""

from lockstep.compat.check.rules.clipping import clip_before_pmean
from lockstep.compat.check.rules.gradients import no_reduction, pmean_in_loss
from lockstep.compat.check.rules.keys import (
    keys_split_in_batches,
    one_key_for_all_devices,
)
from lockstep.compat.check.rules.ladder import next_step
from lockstep.compat.check.rules.loops import fetch_in_loop, fork_loader, ordered_print
from lockstep.compat.check.rules.means import mean_of_means
from lockstep.compat.check.rules.models import (
    batchnorm_of_one_device,
    batchnorm_with_axis_name,
    unpacked_pop,
)
from lockstep.compat.check.rules.names import (
    gone_attribute,
    gone_keyword,
    gone_name,
    gone_option,
    old_name,
    unknown_name,
)
from lockstep.compat.check.rules.stacked import (
    map_over_lists_of_shards,
    replicated_number,
    row_of_stacked_state,
)
from lockstep.compat.check.rules.texts import dead_extra, rank_claim

RULES = (
    gone_name,
    gone_attribute,
    gone_keyword,
    gone_option,
    unknown_name,
    dead_extra,
    no_reduction,
    pmean_in_loss,
    clip_before_pmean,
    mean_of_means,
    one_key_for_all_devices,
    keys_split_in_batches,
    row_of_stacked_state,
    map_over_lists_of_shards,
    replicated_number,
    batchnorm_of_one_device,
    batchnorm_with_axis_name,
    unpacked_pop,
    fetch_in_loop,
    ordered_print,
    fork_loader,
    rank_claim,
    old_name,
    next_step,
)
