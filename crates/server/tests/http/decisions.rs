//! Typed questions that are answered with probabilities.

use serde_json::{Value, json};

use crate::{
    client::post,
    world::{Setup, World},
};

const ROUTE: &str = "/v1/systemone";

/// The model here says one byte: its likelihood is exp(-0.5), that of the next one exp(-1.5), and so on for 128 bytes;
/// of one that is the only one allowed exp(-0.5).
const LIKELY: f64 = -0.5;

fn close(got: &Value, wanted: f64) -> bool {
    got.as_f64().is_some_and(|got| (got - wanted).abs() < 1e-9)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn labels_are_as_likely_as_the_model_says() {
    let world = World::ready(Setup::saying("B")).await;
    let questions = json!({
        "team": {"type": "choice", "instructions": "Who?", "criteria": {"billing": "money", "shipping": null, "other": {"a": 1}}},
        "tone": {"type": "score", "instructions": {"how": "upset"}, "criteria": ["calm", "furious"]},
    });
    let body = json!({"state": {"ticket": "Charged twice."}, "questions": questions});
    let told = post(world.address, ROUTE, &body).await.json();
    // A stands before B: it is not among the 128 likeliest, and asked for by itself.
    let masses = [LIKELY.exp(), LIKELY.exp(), (LIKELY - 1.0).exp()];
    let all: f64 = masses.iter().sum();
    let team = &told["answers"]["team"];
    assert_eq!((&team["type"], &team["choice"]), (&json!("choice"), &json!("billing")), "{told}");
    for (name, mass) in ["billing", "shipping", "other"].into_iter().zip(masses) {
        assert!(close(&team["probabilities"][name], mass / all), "{name}: {team}");
    }
    assert!(close(&team["confidence"], masses[0]), "{team}");
    let diagnostics = &told["diagnostics"]["team"];
    assert!(close(&diagnostics["label_mass"], all) && diagnostics["argmax_is_label"] == true, "{told}");
    // Digits stand before letters, too: both are asked for by themselves.
    let tone = &told["answers"]["tone"];
    assert_eq!(tone["legend"], json!({"0": "calm", "1": "furious"}));
    assert!(close(&tone["score"], 0.5) && close(&tone["probabilities"]["1"], 0.5), "{tone}");
    assert_eq!(told["diagnostics"]["tone"]["argmax_is_label"], false);
    assert_eq!(
        (&told["object"], &told["usage"]["output_tokens"]),
        (&json!("structured_decision"), &json!(2))
    );
    let again = post(world.address, ROUTE, &body).await.json();
    assert_eq!((&again["answers"], &again["diagnostics"]), (&told["answers"], &told["diagnostics"]));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn questions_that_are_wrong_are_told_by_their_place() {
    let world = World::ready(Setup::saying("B")).await;
    let check = async |questions: Value, param: &str| {
        let refused = post(world.address, ROUTE, &json!({"state": "s", "questions": questions})).await;
        let error = &refused.json()["error"];
        assert_eq!((refused.status, &error["param"]), (400, &json!(param)), "{questions}: {error}");
    };
    let one = |question: Value| json!({"q": question});
    let choice = |criteria: Value| one(json!({"type": "choice", "instructions": "?", "criteria": criteria}));
    check(json!({}), "questions").await;
    check(one(json!({"type": "essay", "instructions": "?"})), "questions[0].type").await;
    check(one(json!({"type": "noul"})), "questions[0].instructions").await;
    check(one(json!({"type": "noul", "instructions": "?", "secret": 1})), "questions[0].secret").await;
    check(
        one(json!({"type": "noul", "instructions": "?", "criteria": {"maybe": "?"}})),
        "questions[0].criteria",
    )
    .await;
    check(choice(json!({})), "questions[0].criteria").await;
    check(choice(json!(["a"])), "questions[0].criteria").await;
    check(choice((0..27).map(|n| (n.to_string(), Value::Null)).collect()), "questions[0].criteria").await;
    check(one(json!({"type": "score", "instructions": "?", "criteria": ["a"]})), "questions[0].criteria")
        .await;
    check(
        (0..65).map(|n| (n.to_string(), json!({"type": "noul", "instructions": "?"}))).collect(),
        "questions",
    )
    .await;
    let own = json!({"state": "s", "questions": choice(json!({"a": null})), "chat_template_kwargs": {"messages": []}});
    let refused = post(world.address, ROUTE, &own).await.json();
    assert_eq!(refused["error"]["param"], "chat_template_kwargs.messages");
    // A model of bytes has no token for yes.
    let noul = json!({"state": "s", "questions": one(json!({"type": "noul", "instructions": "?"}))});
    let refused = post(world.address, ROUTE, &noul).await.json();
    assert_eq!(refused["error"]["code"], "MODEL_UNSUPPORTED", "{refused}");
}

/// What is asked about stands in every question's prompt.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_state_that_does_not_fit_ends_at_the_first_question() {
    let world = World::ready(Setup { context: 512, ..Setup::saying("B") }).await;
    let choice = json!({"type": "choice", "instructions": "?", "criteria": {"a": null}});
    // Of which this model has no token for yes: where both are made, that is what is told.
    let noul = json!({"type": "noul", "instructions": "?"});
    let body = json!({"state": "s".repeat(1000), "questions": {"first": choice, "second": noul}});
    let refused = post(world.address, ROUTE, &body).await.json();
    assert_eq!(refused["error"]["code"], "PROMPT_TOO_LONG", "{refused}");
}
