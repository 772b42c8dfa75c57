//! Responses that are kept, on both databases.
#![expect(clippy::unwrap_used, reason = "a test stops at the first surprise")]

mod common;

use std::time::Duration;

use common::databases;
use fornax_jobs::{
    EndedResponse, NewJob, NewResponse, Outcome, Page, Policy, ResponseItem, State, Store, StoreOptions,
};
use serde_json::{Value, json};

fn item(id: &str, said: bool) -> ResponseItem {
    ResponseItem { id: id.to_owned(), said, body: json!({"id": id}).to_string() }
}

fn response(id: &str, previous: Option<&str>) -> NewResponse {
    NewResponse {
        id: id.to_owned(),
        owner: "o".to_owned(),
        previous: previous.map(str::to_owned),
        conversation: None,
        body: json!({"id": id}).to_string(),
        items: vec![item(&format!("{id}-asked"), false), item(&format!("{id}-said"), true)],
    }
}

fn job() -> NewJob {
    NewJob {
        model: "m".to_owned(),
        owner: "o".to_owned(),
        shares: false,
        input: json!({"input": "a"}),
        webhook: None,
        policy: Policy::default(),
        idempotency_key: None,
    }
}

fn settle(ended: EndedResponse) -> (String, Vec<ResponseItem>) {
    let EndedResponse { mut body, state, output } = ended;
    body["state"] = json!(state.name());
    body["output"] = output;
    (body.to_string(), vec![item("late", true)])
}

async fn ids(store: &Store, id: &str) -> Vec<String> {
    let conversation = store.conversation("o", id).await.unwrap().unwrap();
    let items = store.conversation_items(&conversation).await.unwrap();
    assert_eq!(conversation.bytes, items.iter().map(|item| item.len() as u64).sum::<u64>());
    let id = |item: &String| serde_json::from_str::<Value>(item).unwrap()["id"].as_str().unwrap().to_owned();
    items.iter().map(id).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_conversation_is_what_was_asked_and_said_from_the_first_response_on() {
    for database in databases("a_conversation_is_what_was_asked_and_said_from_the_first_response_on") {
        let store = Store::open(database.options()).await.unwrap();
        for (id, previous) in [("a", None), ("b", Some("a")), ("c", Some("b")), ("d", Some("a"))] {
            store.keep_response(&response(id, previous)).await.unwrap();
        }
        store.close().await;
        let store = Store::open(database.options()).await.unwrap();
        assert_eq!(ids(&store, "c").await, ["a-asked", "a-said", "b-asked", "b-said", "c-asked", "c-said"]);
        assert_eq!(ids(&store, "d").await, ["a-asked", "a-said", "d-asked", "d-said"]);
        assert_eq!(
            store.response_item("o", "b-said").await.unwrap(),
            Some(json!({"id": "b-said"}).to_string())
        );
        let page = Page { after: None, newest_first: true, most: 9 };
        let input = store.response_input("o", "b", page).await.unwrap();
        assert_eq!(input, Some(vec![json!({"id": "b-asked"})]));
        // Nobody else has any of it.
        assert_eq!(store.conversation("x", "c").await.unwrap(), None);
        assert_eq!(store.response("x", "c").await.unwrap(), None);
        assert_eq!(store.response_item("x", "b-said").await.unwrap(), None);
        assert_eq!(store.response_input("x", "b", page).await.unwrap(), None);
        assert!(!store.delete_response("x", "b").await.unwrap());
        assert!(
            store.delete_response("o", "b").await.unwrap() && !store.delete_response("o", "b").await.unwrap()
        );
        assert!(!store.conversation("o", "c").await.unwrap().unwrap().is_whole);
        assert!(store.conversation("o", "d").await.unwrap().unwrap().is_whole);
        assert_eq!(store.response_item("o", "b-said").await.unwrap(), None);
        store.close().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_was_not_used_for_the_longest_makes_room() {
    for database in databases("what_was_not_used_for_the_longest_makes_room") {
        let options = StoreOptions { responses_max: 3, ..database.options() };
        let store = Store::open(options).await.unwrap();
        for (id, previous) in [("a", None), ("b", None), ("c", None)] {
            store.keep_response(&response(id, previous)).await.unwrap();
        }
        let others = NewResponse { owner: "x".to_owned(), ..response("x", None) };
        store.keep_response(&others).await.unwrap();
        // Going on from the oldest keeps it.
        store.keep_response(&response("d", Some("a"))).await.unwrap();
        let known = async |store: &Store| {
            let mut known = Vec::new();
            for id in ["a", "b", "c", "d", "e"] {
                known.extend(store.response("o", id).await.unwrap().map(|_| id));
            }
            known
        };
        assert_eq!(known(&store).await, ["a", "c", "d"]);
        assert!(store.response("x", "x").await.unwrap().is_some());
        store.close().await;
        // A response has sixteen bytes of its own and those of its items.
        let bytes = response("a", None).items.iter().map(|item| item.body.len() as u64).sum::<u64>();
        let options = StoreOptions { response_bytes_max: 2 * (bytes + 10), ..database.options() };
        let store = Store::open(options).await.unwrap();
        store.keep_response(&response("e", None)).await.unwrap();
        assert_eq!(known(&store).await, ["d", "e"]);
        store.close().await;
        let options = StoreOptions { retention: Duration::ZERO, ..database.options() };
        let store = Store::open(options).await.unwrap();
        store.keep_response(&response("f", Some("e"))).await.unwrap();
        store.sweep().await.unwrap();
        assert_eq!(
            known(&store).await,
            ["d"],
            "what was used just now has no time left, and the older one has"
        );
        store.close().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_response_is_answered_once_by_its_job_whoever_dies() {
    for database in databases("a_response_is_answered_once_by_its_job_whoever_dies") {
        let store = Store::open(database.options()).await.unwrap();
        let asked = |id: &str| NewResponse { items: vec![item("asked", false)], ..response(id, None) };
        store.begin_response(&asked("a"), &job(), "/talk").await.unwrap();
        assert_eq!(store.response("o", "a").await.unwrap().unwrap().state, Some(State::Queued));
        let lost = store.claim("m", "first").await.unwrap().unwrap();
        assert_eq!((lost.job.id.as_str(), lost.job.route.as_deref()), ("a", Some("/talk")));
        assert_eq!(store.response("o", "a").await.unwrap().unwrap().state, Some(State::Running));
        assert!(store.conversation("o", "a").await.unwrap().unwrap().is_open);
        // Its worker is gone.
        store.close().await;
        let store = Store::open(database.options()).await.unwrap();
        if database.is_postgres() {
            assert!(store.recover(&lost.lease, None).await.unwrap());
        }
        let claim = store.claim("m", "second").await.unwrap().unwrap();
        assert_eq!((claim.job.id.as_str(), claim.job.attempts), ("a", 2));
        assert_eq!(store.settle_responses(settle).await.unwrap(), 0);
        let done = |said: &str| Outcome::Completed(json!({"said": said}));
        assert!(store.finish(&claim, done("second"), Duration::ZERO).await.unwrap());
        assert!(!store.finish(&lost, done("first"), Duration::ZERO).await.unwrap());
        // However long nobody has looked, it is not forgotten with the jobs.
        store.close().await;
        let store =
            Store::open(StoreOptions { retention: Duration::ZERO, ..database.options() }).await.unwrap();
        store.sweep().await.unwrap();
        assert_eq!(store.settle_responses(settle).await.unwrap(), 1);
        assert_eq!(store.settle_responses(settle).await.unwrap(), 0);
        let ended = store.response("o", "a").await.unwrap().unwrap();
        assert_eq!(ended.state, None);
        assert_eq!(ended.body, json!({"id": "a", "state": "COMPLETED", "output": {"said": "second"}}));
        assert_eq!(ids(&store, "a").await, ["asked", "late"]);
        assert_eq!(store.get("a").await.unwrap(), None);
        store.close().await;

        let store = Store::open(database.options()).await.unwrap();
        for id in ["b", "c"] {
            store.begin_response(&asked(id), &job(), "/talk").await.unwrap();
        }
        let claim = store.claim("m", "third").await.unwrap().unwrap();
        assert!(store.delete_response("o", &claim.job.id).await.unwrap());
        assert_eq!(store.beat("third").await.unwrap(), Vec::<String>::new(), "it is not wanted any more");
        assert_eq!(store.cancel("c").await.unwrap().state, State::Cancelled);
        assert!(store.settle_response("c", settle).await.unwrap());
        assert_eq!(store.response("o", "c").await.unwrap().unwrap().body["state"], "CANCELLED");
        store.close().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_conversation_of_its_own_gets_the_items_of_its_responses() {
    for database in databases("a_conversation_of_its_own_gets_the_items_of_its_responses") {
        let store = Store::open(database.options()).await.unwrap();
        let told = json!({"id": "conv"});
        store.begin_conversation("o", "conv", &told, vec![item("first", false)]).await.unwrap();
        let of = |id: &str| NewResponse { conversation: Some("conv".to_owned()), ..response(id, None) };
        store.keep_response(&of("a")).await.unwrap();
        // The body of one that is answered later says which conversation it is of.
        let later = NewResponse {
            body: json!({"id": "b", "conversation": {"id": "conv"}}).to_string(),
            items: vec![item("b-asked", false)],
            ..of("b")
        };
        store.begin_response(&later, &job(), "/v1/responses").await.unwrap();
        assert_eq!(ids(&store, "conv").await, ["first", "a-asked", "a-said"], "not before it is answered");
        let claim = store.claim("m", "w").await.unwrap().unwrap();
        store.finish(&claim, Outcome::Completed(json!({})), Duration::ZERO).await.unwrap();
        assert!(store.settle_response("b", settle).await.unwrap());
        let all = ["first", "a-asked", "a-said", "b-asked", "late"];
        assert_eq!(ids(&store, "conv").await, all);
        assert!(store.add_items("o", "conv", &[item("more", false)]).await.unwrap());
        assert!(store.delete_item("o", "conv", "a-asked").await.unwrap());
        assert!(!store.delete_item("o", "conv", "a-asked").await.unwrap());
        assert_eq!(ids(&store, "conv").await, ["first", "a-said", "b-asked", "late", "more"]);
        assert_eq!(store.item("o", "conv", "late").await.unwrap(), Some(json!({"id": "late"})));
        // The response keeps its own.
        assert_eq!(ids(&store, "a").await, ["a-asked", "a-said"]);
        let page = Page { after: Some("late"), newest_first: true, most: 2 };
        let items = store.items("o", "conv", page).await.unwrap();
        assert_eq!(items, Some(vec![json!({"id": "b-asked"}), json!({"id": "a-said"})]));
        // Nobody else's.
        assert!(!store.add_items("x", "conv", &[item("theirs", false)]).await.unwrap());
        assert!(!store.delete_item("x", "conv", "more").await.unwrap());
        assert_eq!(store.items("x", "conv", page).await.unwrap(), None);
        assert_eq!(store.item("x", "conv", "more").await.unwrap(), None);
        assert!(!store.describe_conversation("x", "conv", &json!({})).await.unwrap());
        assert!(store.describe_conversation("o", "conv", &json!({"id": "conv", "a": "b"})).await.unwrap());
        let body = store.response("o", "conv").await.unwrap().unwrap().body;
        assert_eq!(body, json!({"id": "conv", "a": "b"}));
        // One that is gone gets nothing, and what would be added to it is kept all the same.
        assert!(store.delete_response("o", "conv").await.unwrap());
        store.keep_response(&of("c")).await.unwrap();
        assert_eq!(ids(&store, "c").await, ["c-asked", "c-said"]);
        assert_eq!(store.item("o", "conv", "c-said").await.unwrap(), None);
        store.close().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn models_that_were_made_are_kept_by_their_names() {
    for database in databases("models_that_were_made_are_kept_by_their_names") {
        let store = Store::open(database.options()).await.unwrap();
        for (name, body) in [("b", json!(1)), ("a", json!(2)), ("b", json!(3))] {
            store.keep_made(name, &body).await.unwrap();
        }
        let all = [("a".to_owned(), json!(2)), ("b".to_owned(), json!(3))];
        assert_eq!(store.made().await.unwrap(), all);
        assert!(store.forget_made("a").await.unwrap());
        assert!(!store.forget_made("a").await.unwrap());
        assert_eq!(store.made().await.unwrap(), all[1..]);
        store.close().await;
    }
}
