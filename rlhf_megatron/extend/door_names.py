"""The table of the door: every name of `rlhf_megatron.extend`, the module that has it, and one line
about it.

A new name is one line here. `python -m tools.extend_door` writes it into the imports for type
checkers in `__init__.py` and into the tables of docs/extending.md. A name that is here stays: to
rename it, move the old name to FORMER_NAMES.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class DoorName:
    """Where a name of the door comes from."""

    module: str
    attribute: str  # its name in that module
    summary: str  # one line for docs/extending.md


@dataclass(frozen=True)
class FormerDoorName:
    """A name that the door had. It still works, with a FutureWarning, until a version."""

    name: str  # the name that took its place
    removed_in: str  # version of this package that has the former name no more


def _from_module(module: str, **summaries: str) -> dict[str, DoorName]:
    """Names that the module has under the same name."""
    return {name: DoorName(module, name, summary) for name, summary in summaries.items()}


def _under_new_name(name: str, module: str, attribute: str, summary: str) -> dict[str, DoorName]:
    """A name that says too little outside of its module, under one that says enough."""
    return {name: DoorName(module, attribute, summary)}


_ADVANTAGE_ESTIMATORS = {
    **_from_module(
        "rlhf_megatron.algorithms.advantages.advantage_estimator",
        ADV_ESTIMATORS="registry of `algorithm.adv_estimator`",
        AdvantageInputs="columns of a step that an estimator reads",
        AdvantageOutputs="advantages, and returns where the estimator has any",
        AdvantageEstimator="type of an estimator: (inputs, params) -> outputs",
        GroupEstimator="type of what `register_group_estimator` decorates",
        RewardKeys='property `reward_keys` of params, where the estimator needs "reward_parts"',
        register_group_estimator="decorator of an estimator that compares the samples of a prompt",
        compute_sample_rewards="reward of each whole sample, KL in the reward included",
        spread_over_response_tokens="an advantage of each sample, on all its response tokens",
        count_response_tokens="response tokens of each sample",
        find_true_positions="indices of a mask's True entries, fast",
        repeat_per_sample_length="an entry of each sample, repeated over its tokens",
    ),
    **_from_module(
        "rlhf_megatron.algorithms.advantages.response_tokens",
        ResponseTokens="the tokens that train, packed: gather, scatter, sums to go",
        RunningMoments="mean and variance of numbers that come in parts",
        WHITEN_EPSILON="what whitening adds to the variance",
        compute_discounted_sums_="discounted sums from the back of each segment, in place",
        whiten_advantages_="mean 0 and variance 1 of a column, in place",
        whiten_sample_advantages="the same for one advantage a sample, without its tokens",
    ),
    **_from_module(
        "rlhf_megatron.algorithms.prompt_groups",
        PromptGroups="statistics of the samples of each prompt",
        compute_group_advantages="(reward - mean) / standard deviation within each prompt",
    ),
    **_from_module(
        "rlhf_megatron.algorithms.metric_names",
        make_single_key_part="a name of a run as one part of a metric's key",
    ),
}

_POLICY_LOSSES = {
    **_from_module(
        "rlhf_megatron.algorithms.losses.policy_loss",
        POLICY_LOSSES="registry of `actor.policy_loss.loss_mode`",
        PolicyLossInputs="columns of a micro-batch that a loss reads",
        PolicyLossOutputs="loss and metrics of each token",
        PolicyLoss="type of a loss: (inputs, params) -> outputs",
        mark_returns_gradient="decorator of a loss that tells its gradient instead of autograd",
        attach_gradient="a value with a gradient that was computed by hand",
        TokenPickInputs="columns of a mini-batch that a choice of tokens reads",
        TokenPick="type of a choice of tokens: (inputs, params) -> mask",
    ),
    **_under_new_name(
        "TOKEN_PICKS",
        "rlhf_megatron.algorithms.losses.policy_loss",
        "PICKS",
        'registry of the choices of tokens, for losses that need "is_picked"',
    ),
    **_from_module(
        "rlhf_megatron.algorithms.losses.importance_ratio",
        compute_clamped_log_ratio="log of the importance ratio, clamped, with gradient",
        compute_sequence_ratio="importance ratio of whole sequences, on their tokens",
        compute_clipped_loss="PPO's clipped loss, and where it was clipped",
        make_ppo_kl_metric="the metric actor/ppo_kl",
        check_clip_range="refuse clip bounds that are no range around 1",
    ),
    **_from_module(
        "rlhf_megatron.algorithms.losses.kl_estimators",
        KLType="names of the estimators of a KL divergence",
        MAX_LOG_RATIO="bound of log ratios before exp",
        estimate_kl="an estimate of the KL divergence at each token",
        compute_kl_with_gradient="the same with its gradient",
    ),
    **_from_module(
        "rlhf_megatron.algorithms.losses.token_covariance",
        compute_token_covariances="covariance of log-prob and advantage of each token",
        count_picked_tokens="tokens in a share, at least one",
        make_index_mask="a mask that is True at some indices",
        check_token_share="refuse a share of tokens outside of (0, 1]",
    ),
    **_from_module(
        "rlhf_megatron.algorithms.row_sequences",
        RowSequences='sums over whole sequences, for losses that need "sequences"',
    ),
}

_AGGREGATIONS = _from_module(
    "rlhf_megatron.algorithms.loss_aggregation",
    AGGREGATIONS="registry of `actor.loss_agg_mode`",
    AggregationInputs="mask and counts that an aggregation reads",
    Aggregation="type of an aggregation: inputs -> weight of each token",
    sum_by_sequence="sum of a token column over each sequence",
)

_PREFERENCE_LOSSES = {
    **_from_module(
        "rlhf_megatron.algorithms.preferences.preference_loss",
        PREFERENCE_LOSSES="registry of `sft.loss_mode` for pairs of answers",
        PreferencePairs="log-probs (or rewards) of chosen and rejected answers",
        PreferenceLossOutputs="loss and implied rewards of each pair",
        PreferenceLossFunction="type of a preference loss: (pairs, params) -> outputs",
    ),
    **_from_module(
        "rlhf_megatron.algorithms.distillation.distillation_loss",
        DISTILLATION_LOSSES="registry of the losses against a teacher",
        DistillationLoss="type of a distillation loss: (student, teacher) -> nats of each token",
        DistillationParams="parameters that every distillation loss has",
        normalize_top_k_log_probs="a teacher's top tokens as a whole distribution",
    ),
}

_REWARDS = {
    **_from_module(
        "rlhf_megatron.data.extra_columns",
        parse_extra="the columns of the row in a sample's `extra`",
        LeftOutColumnError="what asking for a column that could not be carried raises",
    ),
    **_from_module(
        "rlhf_megatron.rewards.scorers.reward_types",
        REWARDS="registry of `reward.name`",
        RewardSample="what a reward reads of a sample",
        RewardResult="score, status and parts of one sample",
        Reward="type of a reward: (sample, params) -> result",
        OWN_PROCESS="a need: the reward runs in a worker that is killed when it hangs",
        MAX_SCORE="the largest score that is taken",
        BadResultError="what a result that is no score raises",
        is_masked="whether a status leaves the sample out of training",
        make_masked_result="result of a sample that failed through no fault of the policy",
        make_bad_label_result="result of a sample whose label cannot be scored",
        check_pattern="refuse what is no regular expression",
        PreparedParams="params with `prepare`, called once in the process that scores",
        MemoryLimitedParams="params with `max_memory_gib` of a worker",
        PatternSearchingParams="params that say whether the reward needs its own process",
        ResultKeyParams="params with `make_result_key`: samples of one key have one result",
        LabelCheckingParams="params with `find_label_problem`: bad rows are refused at start",
        PartialReadingParams=(
            "params with `describe_partial_reading`: labels that are not read whole are reported"
        ),
        ServerWaitingParams="params with `waits_s`, of a reward that asks a server",
        ResponseReadingParams="params that say which special tokens of a response are read",
        read_response="the response with its special tokens, behind what the prompt wrote of it",
        drop_stop_token="the sample without the special token that ended its response",
    ),
    **_under_new_name(
        "STATUS_OK",
        "rlhf_megatron.rewards.scorers.reward_types",
        "OK",
        "status of a sample that was scored",
    ),
    **_under_new_name(
        "STATUS_MALFORMED",
        "rlhf_megatron.rewards.scorers.reward_types",
        "MALFORMED",
        "status of a response without a readable answer: score 0",
    ),
    **_under_new_name(
        "STATUS_TIMEOUT",
        "rlhf_megatron.rewards.scorers.reward_types",
        "TIMEOUT",
        "status of an answer that kept the verifier too long: score 0",
    ),
    **_from_module(
        "rlhf_megatron.rewards.scorers.answer_params",
        AnswerParams="base class of params of a reward that reads an answer out of a response",
        parse_answer="group 1 of the last match of a pattern",
        find_last_block="the last fenced block in one of some languages",
        find_last_boxed=r"the content of the last \boxed{...}",
    ),
    **_from_module(
        "rlhf_megatron.rewards.reward_endpoint",
        RewardEndpoint="a server that rewards ask: retries, rate and number of requests",
        RewardEndpointAnswer="what such a server answered",
        RewardEndpointError="the server did not answer",
        RewardEndpointRefusedError="the server refused this request",
    ),
    **_from_module(
        "rlhf_megatron.rewards.endpoint_replicas",
        ask_any_replica="ask one of several equal servers",
        compute_max_wait_s="seconds that `ask_any_replica` may take",
    ),
    **_from_module(
        "rlhf_megatron.rewards.sandbox.sandbox_protocol",
        ProgramSandbox="protocol of what runs programs of the policy",
        SandboxSession="protocol of a sandbox with one program",
        SandboxProgram="a program to run",
        ProgramResult="how a program ended, and what it wrote",
        SandboxUnavailableError="the sandbox is to blame, not the program",
    ),
    **_from_module(
        "rlhf_megatron.rewards.sandbox.local_sandbox",
        LocalSandbox="a sandbox on this machine",
        SandboxSettings="settings of a local sandbox",
    ),
    **_from_module(
        "rlhf_megatron.rewards.sandbox.sandbox_layers",
        SandboxLimits="limits of time, memory and files of a program",
    ),
    **_from_module(
        "rlhf_megatron.rewards.sandbox.remote_sandbox",
        RemoteSandbox="a sandbox behind HTTP",
    ),
    **_under_new_name(
        "RemoteSandboxProtocol",
        "rlhf_megatron.rewards.sandbox.remote_sandbox",
        "Protocol",
        "names of the protocols that a remote sandbox speaks",
    ),
    **_from_module(
        "rlhf_megatron.rewards.sandbox.long_integers",
        read_long_json="read JSON with integers of any number of digits, in linear time",
    ),
    **_from_module(
        "rlhf_megatron.rewards.scorers.code_comparison",
        ComparisonRule="name of a rule that compares a program's output: close, exact, allclose",
        is_same_output="whether a program printed what a test expects",
        read_returned_value="read what a program's function returned, sets included",
    ),
    **_under_new_name(
        "is_same_returned_value",
        "rlhf_megatron.rewards.scorers.code_comparison",
        "is_same_value",
        "whether a program's function returned what a test expects",
    ),
}

_MODEL_FAMILIES = {
    **_from_module(
        "rlhf_megatron.weights.families.model_family",
        FAMILIES="registry of `model_type` in config.json",
        ModelFamily="everything that is particular to one architecture",
        HFConfig="type of a parsed config.json",
        read_positive_int="a positive integer of config.json",
    ),
    **_from_module(
        "rlhf_megatron.weights.families.family_lookup",
        refuse_unsupported_settings="refuse settings that the family does not implement",
    ),
    **_from_module(
        "rlhf_megatron.weights.families.decoder_family",
        DecoderDimensions="dimensions of a decoder",
        AttentionWindow="layers whose tokens see a window only",
        read_decoder_dimensions="dimensions of a decoder from config.json",
        make_decoder_family="the family of a decoder, from its dimensions",
    ),
    **_from_module(
        "rlhf_megatron.weights.families.expert_layers",
        ExpertLayers="dimensions of layers with experts",
        read_expert_layers="those dimensions from config.json",
        find_unknown_keys="keys of config.json that nobody reads",
        make_expert_name="Megatron's name of an expert",
        make_expert_arguments="TransformerConfig arguments of layers with experts",
        make_expert_rules="weight rules of a layer with experts",
        make_sigmoid_router_arguments="TransformerConfig arguments of sigmoid routers",
        find_unsupported_sigmoid_settings="settings of sigmoid routers that are not implemented",
    ),
    **_from_module(
        "rlhf_megatron.weights.families.latent_attention",
        LatentAttentionDimensions="dimensions of latent attention",
        read_latent_dimensions="those dimensions from config.json",
        find_unsupported_latent_settings="settings of latent attention that are not implemented",
        make_latent_arguments="TransformerConfig arguments of latent attention",
        make_latent_rules="weight rules of latent attention",
    ),
    **_under_new_name(
        "LATENT_ATTENTION_KEYS",
        "rlhf_megatron.weights.families.latent_attention",
        "LATENT_KEYS",
        "keys of config.json that latent attention reads",
    ),
    **_from_module(
        "rlhf_megatron.config.rope",
        RotaryConfig="rotary embeddings of a model",
        YarnScaling="YaRN's scaling of rotary embeddings",
        read_rotary_config="rotary embeddings from config.json",
    ),
    **_from_module(
        "rlhf_megatron.weights.weight_table",
        WeightRule="one Megatron tensor, its Hugging Face tensors, split and owner",
        HFTensor="a tensor of a Hugging Face checkpoint",
        StackedEntry="a tensor that is one entry of a fused tensor",
        TensorSplit="how tensor parallelism cuts a tensor",
        LayerPart="part of a layer that a rule belongs to",
        StageOwner="pipeline stage that a rule belongs to",
        make_plain_rule="rule of a tensor that is the same on both sides",
        concatenate_tensors="several tensors as one, for `to_megatron`",
        split_into_halves="one tensor as two, for `to_hf`",
    ),
}

_ENGINES = {
    **_from_module(
        "rlhf_megatron.rollout.engine_kinds",
        ENGINES="registry of `rollout.engine`",
        EngineKind="base class of a kind of engine: check, start, client, transports",
        LocalEngineKind="the bundled server",
        SGLangEngineKind="stock SGLang",
    ),
    **_from_module(
        "rlhf_megatron.rollout.engine_interface",
        InferenceEngine="protocol of an engine's client",
        EngineAddress="how an engine is reached",
        SamplingParams="how a prompt is continued",
        GenerateRequest="one prompt and the seeds of its samples",
        GeneratedSample="tokens and log-probs of one sample",
        SampleGroups="type of an answer: the samples of each request",
        VersionSpan="tokens that are of one version of the weights",
        TokenColumn="an array that stands where a tuple of numbers could",
        FinishReason="type: why a sample ended",
        PauseMode="type: what becomes of running requests in a pause",
        MemoryPart="type: what a colocated engine frees",
        MEMORY_PARTS="all parts that it can free",
        WeightTransport="type: names of the transports of weights",
        UNSYNCED="version of samples from weights that the engine loaded itself",
        EngineError="an engine failed",
        EngineTimeoutError="an engine did not answer in time",
        EngineUnreachableError="no connection to an engine",
        EngineStaleError="an engine has not got its weights",
        EngineRequestError="an engine refused the request itself",
        DriverLostError="the process that asked the engine is gone",
    ),
    **_from_module(
        "rlhf_megatron.rollout.local.local_client",
        LocalEngine="client of the bundled server",
    ),
    **_from_module(
        "rlhf_megatron.rollout.sglang.sglang_client",
        SGLangEngine="client of an SGLang server",
    ),
    **_from_module(
        "rlhf_megatron.rollout.sglang.attached_engines",
        AttachedEngines="servers that the run did not start",
    ),
    **_from_module(
        "rlhf_megatron.rollout.fleet.engine_setup",
        EngineSetup="the settings that engines and balancers are made of",
    ),
    **_from_module(
        "rlhf_megatron.config.schema",
        RolloutConfig="section `rollout` of the configuration",
    ),
    **_from_module(
        "rlhf_megatron.rollout.fleet.server_process",
        EngineServers="servers that were started together",
        ServerLaunch="protocol of one server and how it is started",
        ServerProcess="a server as a child of this process",
        ServerProcessHandle="protocol of a server process, here or elsewhere",
        ServerSeat="machine and devices of a server",
        LaunchPlacement="type: where servers are started",
        StartProgress="type: what is told while servers start",
        LOOPBACK="the address of this machine for itself",
        launch_here="the placement on this machine",
        await_server_ready="wait until a server answers, or say why it ended",
        write_token_file="a new bearer token, in a private file",
    ),
    **_from_module(
        "rlhf_megatron.rollout.http_client",
        HttpClient="HTTP to one server, in the event loop",
        HttpAnswer="status and body of an answer",
        run_in_event_loop="run a coroutine there and wait for it",
        start_in_event_loop="start a coroutine there",
    ),
    **_from_module(
        "rlhf_megatron.rollout.generate_gate",
        GenerateGate="pauses and aborts the generate calls of a client",
    ),
    **_from_module(
        "rlhf_megatron.rollout.generation_queries",
        GenerationQuery="base class of a generate call that a driver process can send",
        send_query="send a query from here or from a driver",
    ),
    **_under_new_name(
        "register_wire_class",
        "rlhf_megatron.data.codec",
        "register",
        "decorator of a frozen dataclass that travels between processes, by its wire name",
    ),
    **_from_module(
        "rlhf_megatron.rollout.transports.bucket_transport",
        BucketTransport="base class of what brings weight buckets to an engine",
        DeliveryTraffic="bytes of one delivery",
    ),
    **_from_module(
        "rlhf_megatron.rollout.transports.tensor_transport",
        FileBucketTransport="buckets through files or shared memory",
        LocalTensorTransport="buckets in memory of the bundled server's machine",
        SGLangTensorTransport="buckets in memory of an SGLang server's machine",
    ),
    **_from_module(
        "rlhf_megatron.rollout.transports.disk_transport",
        SGLangDiskTransport="checkpoints on a disk that an SGLang server loads",
    ),
    **_from_module(
        "rlhf_megatron.rollout.transports.process_group_transport",
        ProcessGroupTransport="buckets over a process group",
        EngineProcessGroups="process groups between a rank and engines",
    ),
    **_from_module(
        "rlhf_megatron.rollout.transports.link_transport",
        EngineLinkVerbs="protocol: an engine takes parts of tensors over a process group",
        LocalLinkVerbs="the same of the bundled server",
        SGLangLinkVerbs="the same of SGLang",
    ),
    **_from_module(
        "rlhf_megatron.weights.bucket_manifest",
        BucketManifest="tensors of one bucket of weights",
        TensorEntry="one tensor, or part of one, in a bucket",
    ),
    **_from_module(
        "rlhf_megatron.ranks.resharding.weight_sender",
        SenderWorld="protocol of the rank that sends weights (for annotations)",
    ),
}

_SCHEDULES = {
    **_from_module(
        "rlhf_megatron.controller.scheduler.schedules.schedule_protocol",
        SCHEDULES="registry of `schedule.name`",
        Schedule="protocol and base class of a schedule",
        SyncPolicy="what a weight sync does to groups that are generated",
        StalePolicy="what becomes of a group past the lag",
    ),
    **_from_module(
        "rlhf_megatron.controller.scheduler.schedules.group_flow",
        GroupFlow="where the groups of a run are; what a schedule reads",
        FlowGroup="one group in flight",
        GroupStage="generated, waiting for its rewards, or ready to train",
        FlowEvent="one line of the ledger",
    ),
    **_from_module(
        "rlhf_megatron.controller.scheduler.schedules.group_selection",
        check_oversampling="refuse an oversampling below 1",
        scale_by_oversampling="groups to start where so many are needed",
        find_groups_past_lag="groups in flight past a lag",
        find_groups_to_annotate="groups whose log-probs can be computed early",
        list_oldest_scored="the scored groups with the oldest tokens",
        select_first_scored="a batch of the groups scored first",
        select_first_started="a batch of the groups started first",
        select_oldest="a batch of the groups with the oldest tokens",
        select_oldest_within_lag="the same, that leaves no group behind",
        sorted_group_numbers="numbers of groups, ascending",
    ),
}

_BALANCERS = {
    **_from_module(
        "rlhf_megatron.rollout.engine_kinds",
        BALANCERS="registry of `rollout.router`",
        BalancerKind="base class of a kind of balancer",
    ),
    **_from_module(
        "rlhf_megatron.rollout.fleet.request_balancer",
        RequestBalancer="protocol of a balancer",
        LeastOutstandingBalancer="the run's own balancer",
        RequestChunk="neighbouring requests that travel together",
        ChunkAssignment="a chunk and the engine that it goes to",
        OutstandingLoad="chunks and samples on their way to each engine",
        cut_chunks="requests as chunks, by the configuration alone",
        compute_session_sample_limit="samples of a session that keep an engine full",
    ),
    **_from_module(
        "rlhf_megatron.rollout.chunk_sizes",
        divide_groups_into_chunks="sizes of chunks of groups",
    ),
    **_from_module(
        "rlhf_megatron.rollout.fleet.engine_supervisor",
        FleetMember="one engine of the fleet",
        MemberState="serving, syncing, down and so on",
    ),
    **_from_module(
        "rlhf_megatron.rollout.fleet.engine_calls",
        EngineCallLog="runs blocking calls of engines in threads, and times them",
    ),
    **_from_module(
        "rlhf_megatron.rollout.fleet.server_watch",
        ServerWatch="watches the health of a server in a thread",
    ),
}

_LOGGERS = {
    **_from_module(
        "rlhf_megatron.controller.observe.loggers",
        LOGGERS="registry of `trainer.logger`",
        RunLogger="base class of a logger",
        BatchView="a step's batch as loggers see it",
        is_batch_view_step="whether large things are logged at a step",
        load_or_draw_run_id="the name of a run at a service, the same after a resume",
        shorten_error_text="the text of another library's error on one line",
    ),
    **_from_module(
        "rlhf_megatron.controller.observe.run_facts",
        RunFacts="what is known of a run before its first step",
    ),
    **_from_module(
        "rlhf_megatron.controller.observe.report.run_files",
        HeldOutSample="a sample of an evaluation with its texts",
        LoggedSample="a sample with its texts",
        MismatchStep="how far engine and trainer disagree in a step",
    ),
    **_from_module(
        "rlhf_megatron.controller.observe.report.run_overview",
        estimate_seconds_left="seconds until a run ends",
        format_duration="seconds as text",
    ),
    **_from_module(
        "rlhf_megatron.controller.observe.line_file",
        LineFile="a file of JSON lines that survives a full disk",
        replace_non_finite="a value without NaN and infinity, for JSON",
    ),
    **_from_module(
        "rlhf_megatron.write_errors",
        write_text_file="write a text; an error, also of a full disk, names the file",
    ),
}

_TASKS = {
    **_from_module(
        "rlhf_megatron.data.tasks",
        TASKS="registry of `data.task`",
    ),
    **_from_module(
        "rlhf_megatron.data.data_rows",
        PromptRow="a prompt and its label",
        TaskRows="the rows of a task, some held out",
        ChatMessage="role and content",
        Prompt="type of a prompt: text or chat messages",
        has_json_label="whether a label is the JSON of a list or an object",
    ),
    **_from_module(
        "rlhf_megatron.data.tokenizer",
        Tokenizer="text to token ids and back",
        load_tokenizer="the tokenizer of a model directory",
    ),
}

_ENVIRONMENTS = {
    **_from_module(
        "rlhf_megatron.agents.environment",
        ENVIRONMENTS="registry of `rollout.environment.name`",
        Environment="the base of environments with a `run` of their own",
        TurnEnvironment="the base of environments that answer turn by turn: `reset` and `step`",
        Task="the row that an episode is about, and its seed",
        Turn="what the policy has said in one turn",
        Observation="what the environment answers to a turn, and the turn's reward",
        Outcome="how an episode went: its reward, and the rewards of its turns",
        Chat="type of what `run` calls for a turn of the policy",
        EpisodeOver="raised by `chat` where a limit ends the episode",
    ),
    **_from_module(
        "rlhf_megatron.agents.tool_environment",
        ToolEnvironment="the base of environments whose policy calls tools",
        ListedTools="type of what `list_tools` returns",
        make_tools="functions as tools, no two of one name",
    ),
    **_from_module(
        "rlhf_megatron.agents.tools",
        Tool="a tool with its description for the model",
        ToolError="raised by a tool: the model reads its message as it is",
        ToolLimits="seconds and characters of one call",
        ToolResult="what became of a call",
        make_tool="a typed function as a tool",
        call_tool="a call with checked arguments, whose errors are text",
    ),
    **_from_module(
        "rlhf_megatron.agents.calculator",
        calculate="arithmetic on numbers: a function for `list_tools`",
    ),
    **_from_module(
        "rlhf_megatron.agents.mcp_tools",
        McpServer="a server of tools: a command or an address",
        list_mcp_tools="the tools of a server",
        McpServerError="a server cannot be started or reached",
    ),
    **_from_module(
        "rlhf_megatron.agents.answer_formats.parsed_answer",
        ANSWER_FORMATS="registry of formats in which models write thoughts and calls",
        AnswerFormat="what reads the answers of one format",
        ParsedAnswer="text, thought and calls of an answer",
        AnswerParts="collects them",
        ToolCall="a call that was read",
        BrokenCall="a call that cannot be read, and the reason",
    ),
}

_ANY_PART = {
    **_from_module(
        "rlhf_megatron.rewards.scorers.user_function",
        import_user_function="the function that FILE.py:NAME or PACKAGE.MODULE:NAME names",
    ),
    **_from_module(
        "rlhf_megatron.plugins",
        list_loaded_plugins="plugins of this process, for a part that starts processes",
        load_plugins="run plugins in such a process",
    ),
}

NAMES_BY_KIND: dict[str, dict[str, DoorName]] = {
    "Advantage estimators": _ADVANTAGE_ESTIMATORS,
    "Policy losses": _POLICY_LOSSES,
    "Aggregations": _AGGREGATIONS,
    "Losses of pairs and of teachers": _PREFERENCE_LOSSES,
    "Rewards": _REWARDS,
    "Model families": _MODEL_FAMILIES,
    "Engines": _ENGINES,
    "Schedules": _SCHEDULES,
    "Balancers": _BALANCERS,
    "Loggers": _LOGGERS,
    "Data tasks": _TASKS,
    "Environments": _ENVIRONMENTS,
    "Any part": _ANY_PART,
}
"""Heading in docs/extending.md -> the names of parts of that kind. No name stands under two of
them."""

DOOR_NAMES = {name: entry for names in NAMES_BY_KIND.values() for name, entry in names.items()}

FORMER_DOOR_NAMES: dict[str, FormerDoorName] = {}
"""Former name -> the one that took its place. An entry stays for one release after the new name
appeared."""

BASE_CLASSES = (
    "AnswerParams",
    "BalancerKind",
    "BucketTransport",
    "EngineKind",
    "EngineLinkVerbs",
    "Environment",
    "FileBucketTransport",
    "GenerationQuery",
    "InferenceEngine",
    "LabelCheckingParams",
    "LeastOutstandingBalancer",
    "LocalEngine",
    "LocalEngineKind",
    "LocalLinkVerbs",
    "LocalTensorTransport",
    "MemoryLimitedParams",
    "PatternSearchingParams",
    "PreparedParams",
    "ProcessGroupTransport",
    "ProgramSandbox",
    "RequestBalancer",
    "ResultKeyParams",
    "RunLogger",
    "SGLangDiskTransport",
    "SGLangEngine",
    "SGLangEngineKind",
    "SGLangLinkVerbs",
    "SGLangTensorTransport",
    "SandboxSession",
    "Schedule",
    "ServerLaunch",
    "ServerProcess",
    "ServerProcessHandle",
    "ServerWaitingParams",
    "TurnEnvironment",
)
"""Names of the door that users' classes derive from or are shaped after. Their hooks are checked.
"""
